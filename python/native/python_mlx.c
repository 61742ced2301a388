/* The part of mlx-c that src/mlx calls (mlx/c/mlx.h beside this file), over Python's own mlx.core.
 *
 * Nothing of MLX is linked: one binary runs with every MLX that has the functions of the table below, and every Python of the
 * stable ABI. An mlx_array is a counted holder of an mx.array; a vector is a list; a kernel's config is the dict of its keyword
 * arguments. Streams are not passed on: operations run on the stream that is current in Python, as the model's own do.
 *
 * The caller has the GIL. An exception inside MLX becomes the text of mlx-c's error handler and a non-zero code.
 */
#include "python_mlx.h"

#include <stdlib.h>
#include <string.h>

/* ---- mlx.core ---- */

/* What is asked of mlx.core, by name. */
/* clang-format off */
#define FUNCTIONS(F) \
    F(abs) F(add) F(arange) F(array) F(as_strided) F(bitwise_and) F(concatenate) F(cumsum) F(default_device) F(depends) F(divide) \
    F(eval) F(exp) F(get_active_memory) F(hadamard_transform) F(isnan) F(less) F(less_equal) F(logical_and) F(logical_or) \
    F(matmul) F(max) F(maximum) F(min) F(minimum) F(multiply) F(quantize) F(quantized_matmul) F(reshape) F(right_shift) \
    F(round) F(sqrt) F(subtract) F(sum) F(take) F(tanh) F(transpose) F(view) F(where) F(zeros)
/* clang-format on */

#define ENUMERATE(name) FN_##name,
typedef enum function { FUNCTIONS(ENUMERATE) N_FUNCTIONS } function;
#define NAME(name) #name,
static const char *const function_names[] = {FUNCTIONS(NAME)};

enum { N_TYPES = MLX_COMPLEX64 + 1, MAX_DIMS = 8 };
static const char *const type_names[N_TYPES] = {"bool_", "uint8", "uint16",  "uint32",  "uint64",  "int8",     "int16",
                                                "int32", "int64", "float16", "float32", "float64", "bfloat16", "complex64"};
static const size_t type_sizes[N_TYPES] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, 8};

static PyObject *core; /* mlx.core, once it is open */
static PyObject *functions[N_FUNCTIONS];
static PyObject *types[N_TYPES];
static PyObject *gpu; /* mlx.core.gpu */
static PyObject *shape_name;
static PyObject *dtype_name;
static mlx_error_handler_func handler;
static void *handler_data;

int fkv_python_mlx_open(void) {
    if (core != NULL) return 0;
    PyObject *module = PyImport_ImportModule("mlx.core");
    if (module == NULL) return -1;
    const char *missing = NULL;
    for (int i = 0; i < N_FUNCTIONS && missing == NULL; i++) {
        functions[i] = PyObject_GetAttrString(module, function_names[i]);
        if (functions[i] == NULL) missing = function_names[i];
    }
    for (int i = 0; i < N_TYPES; i++) {
        types[i] = PyObject_GetAttrString(module, type_names[i]);
        if (types[i] == NULL) PyErr_Clear(); /* an older MLX has not all of them; those of rows are asked for below */
    }
    gpu = PyObject_GetAttrString(module, "gpu");
    if (gpu == NULL && missing == NULL) missing = "gpu";
    static const mlx_dtype wanted[] = {MLX_UINT16, MLX_UINT32, MLX_INT32, MLX_FLOAT16, MLX_FLOAT32, MLX_BFLOAT16};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && missing == NULL; i++)
        if (types[wanted[i]] == NULL) missing = type_names[wanted[i]];
    if (missing != NULL) {
        Py_DECREF(module);
        PyErr_Clear();
        PyErr_Format(PyExc_ImportError, "this MLX has no mlx.core.%s, which flatkv needs: pip install -U mlx", missing);
        return -1;
    }
    shape_name = PyUnicode_InternFromString("shape");
    dtype_name = PyUnicode_InternFromString("dtype");
    if (shape_name == NULL || dtype_name == NULL) return -1;
    core = module;
    return 0;
}

/* ---- errors ---- */

void mlx_set_error_handler(mlx_error_handler_func given, void *data, void (*dtor)(void *)) {
    (void)dtor;
    handler = given;
    handler_data = data;
}

static void say(const char *text) {
    if (handler != NULL) handler(text, handler_data);
}

/* The current exception becomes text. */
static int fail(void) {
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *trace = NULL;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value != NULL ? PyObject_Str(value) : NULL;
    PyObject *bytes = text != NULL ? PyUnicode_AsUTF8String(text) : NULL;
    const char *words = bytes != NULL ? PyBytes_AsString(bytes) : NULL;
    say(words != NULL ? words : "an exception without text");
    PyErr_Clear();
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return 1;
}

/* ---- arrays ---- */

typedef struct holder {
    PyObject *array;
    PyObject *bytes; /* what mlx_array_data_uint16() pointed into; NULL until it was called */
    int n_dims;      /* -1 until somebody asked */
    int type;        /* -1 until somebody asked */
    int shape[MAX_DIMS];
} holder;

static holder *held(mlx_array a) { return a.ctx; }

PyObject *fkv_python_mlx_object(mlx_array a) { return a.ctx != NULL ? held(a)->array : NULL; }

/* Takes the reference, also where it fails. */
static mlx_array hold(PyObject *array) {
    holder *h = malloc(sizeof *h);
    if (h == NULL) {
        Py_DECREF(array);
        (void)PyErr_NoMemory();
        return (mlx_array){NULL};
    }
    *h = (holder){.array = array, .n_dims = -1, .type = -1};
    return (mlx_array){h};
}

mlx_array fkv_python_mlx_take(PyObject *array) {
    Py_INCREF(array);
    return hold(array);
}

/* *res becomes a handle of a new reference; NULL is the failure that it came from. */
static int put(mlx_array *res, PyObject *array) {
    if (array == NULL) return fail();
    mlx_array made = hold(array);
    if (made.ctx == NULL) return fail();
    (void)mlx_array_free(*res);
    *res = made;
    return 0;
}

static mlx_array made_or_empty(PyObject *array) {
    mlx_array a = {NULL};
    (void)put(&a, array);
    return a;
}

int mlx_array_free(mlx_array a) {
    if (a.ctx == NULL) return 0;
    Py_DECREF(held(a)->array);
    Py_XDECREF(held(a)->bytes);
    free(a.ctx);
    return 0;
}

int mlx_array_set(mlx_array *arr, const mlx_array src) {
    if (src.ctx == NULL) {
        say("an empty array");
        return 1;
    }
    PyObject *array = held(src)->array;
    Py_INCREF(array);
    return put(arr, array);
}

static holder *looked_at(mlx_array a) {
    holder *h = held(a);
    if (h->n_dims >= 0) return h;
    PyObject *shape = PyObject_GetAttr(h->array, shape_name);
    h->n_dims = shape != NULL ? (int)PyTuple_Size(shape) : 0;
    if (h->n_dims > MAX_DIMS) h->n_dims = MAX_DIMS;
    for (int i = 0; i < h->n_dims; i++) h->shape[i] = (int)PyLong_AsLong(PyTuple_GetItem(shape, i));
    Py_XDECREF(shape);
    PyErr_Clear();
    return h;
}

const int *mlx_array_shape(const mlx_array a) { return looked_at(a)->shape; }
size_t mlx_array_ndim(const mlx_array a) { return (size_t)looked_at(a)->n_dims; }

size_t mlx_array_size(const mlx_array a) {
    const holder *h = looked_at(a);
    size_t n = 1;
    for (int i = 0; i < h->n_dims; i++) n *= (size_t)h->shape[i];
    return n;
}

mlx_dtype mlx_array_dtype(const mlx_array a) {
    static const mlx_dtype likely[] = {MLX_FLOAT32, MLX_BFLOAT16, MLX_FLOAT16, MLX_UINT16, MLX_UINT32};
    holder *h = held(a);
    if (h->type >= 0) return (mlx_dtype)h->type;
    PyObject *type = PyObject_GetAttr(h->array, dtype_name);
    for (size_t i = 0; type != NULL && h->type < 0 && i < sizeof likely / sizeof likely[0]; i++)
        if (PyObject_RichCompareBool(type, types[likely[i]], Py_EQ) == 1) h->type = (int)likely[i];
    for (int i = 0; type != NULL && h->type < 0 && i < N_TYPES; i++)
        if (types[i] != NULL && PyObject_RichCompareBool(type, types[i], Py_EQ) == 1) h->type = i;
    Py_XDECREF(type);
    PyErr_Clear();
    return h->type >= 0 ? (mlx_dtype)h->type : MLX_COMPLEX64;
}

size_t mlx_array_nbytes(const mlx_array a) { return mlx_array_size(a) * type_sizes[mlx_array_dtype(a)]; }

/* ---- calls ---- */

#define CALL(name, ...) PyObject_CallFunctionObjArgs(functions[FN_##name], __VA_ARGS__, NULL)

static PyObject *of(mlx_array a) { return a.ctx != NULL ? held(a)->array : Py_None; }

static PyObject *tuple_of(const int *numbers, size_t n) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; tuple != NULL && i < n; i++) (void)PyTuple_SetItem(tuple, (Py_ssize_t)i, PyLong_FromLong(numbers[i]));
    return tuple;
}

/* Functions whose last arguments are made for the call. Each takes the reference of what it is given. */
static PyObject *call_with(function f, PyObject *a, PyObject *made) {
    PyObject *result = made != NULL ? PyObject_CallFunctionObjArgs(functions[f], a, made, NULL) : NULL;
    Py_XDECREF(made);
    return result;
}

static PyObject *call_with_two(function f, PyObject *a, PyObject *first, PyObject *second) {
    PyObject *result =
        first != NULL && second != NULL ? PyObject_CallFunctionObjArgs(functions[f], a, first, second, NULL) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return result;
}

/* mx.array of bytes that are numbers of a type that a memoryview knows. */
mlx_array mlx_array_new_data(const void *data, const int *shape, int dim, mlx_dtype dtype) {
    static const char *const formats[N_TYPES] = {
        [MLX_UINT8] = "B", [MLX_UINT16] = "H", [MLX_UINT32] = "I", [MLX_INT32] = "i", [MLX_FLOAT32] = "f"};
    if (formats[dtype] == NULL) {
        say("mlx_array_new_data: a type that has no Python format");
        return (mlx_array){NULL};
    }
    size_t n = type_sizes[dtype];
    for (int i = 0; i < dim; i++) n *= (size_t)shape[i];
    PyObject *bytes = PyBytes_FromStringAndSize(data, (Py_ssize_t)n);
    PyObject *plain = bytes != NULL ? PyMemoryView_FromObject(bytes) : NULL;
    PyObject *typed = plain != NULL ? PyObject_CallMethod(plain, "cast", "s", formats[dtype]) : NULL;
    PyObject *array = typed != NULL ? CALL(array, typed) : NULL;
    if (array != NULL && dim != 1) {
        PyObject *flat = array;
        array = call_with(FN_reshape, flat, tuple_of(shape, (size_t)dim));
        Py_DECREF(flat);
    }
    Py_XDECREF(bytes);
    Py_XDECREF(plain);
    Py_XDECREF(typed);
    return made_or_empty(array);
}

mlx_array mlx_array_new_data_managed(void *data, const int *shape, int dim, mlx_dtype dtype, void (*dtor)(void *)) {
    mlx_array a = mlx_array_new_data(data, shape, dim, dtype);
    dtor(data);
    return a;
}

mlx_array mlx_array_new_float32(float value) {
    PyObject *number = PyFloat_FromDouble((double)value);
    PyObject *array = number != NULL ? CALL(array, number, types[MLX_FLOAT32]) : NULL;
    Py_XDECREF(number);
    return made_or_empty(array);
}

mlx_array mlx_array_new_int(int value) {
    PyObject *number = PyLong_FromLong(value);
    PyObject *array = number != NULL ? CALL(array, number, types[MLX_INT32]) : NULL;
    Py_XDECREF(number);
    return made_or_empty(array);
}

int mlx_array_eval(mlx_array a) {
    PyObject *none = CALL(eval, of(a));
    if (none == NULL) return fail();
    Py_DECREF(none);
    return 0;
}

/* The stable ABI of 3.10 has no buffers: the numbers come as bytes, which the handle keeps. */
const uint16_t *mlx_array_data_uint16(const mlx_array a) {
    holder *h = held(a);
    PyObject *view = PyMemoryView_FromObject(h->array);
    PyObject *bytes = view != NULL ? PyObject_CallMethod(view, "tobytes", NULL) : NULL;
    Py_XDECREF(view);
    if (bytes == NULL) {
        (void)fail();
        return NULL;
    }
    Py_XDECREF(h->bytes);
    h->bytes = bytes;
    return (const uint16_t *)(const void *)PyBytes_AsString(bytes);
}

/* Asked of pools only, which are zeros that were evaluated. */
int _mlx_array_is_row_contiguous(bool *res, const mlx_array a) {
    (void)a;
    *res = true;
    return 0;
}

/* ---- vectors ---- */

mlx_vector_array mlx_vector_array_new(void) { return (mlx_vector_array){PyList_New(0)}; }

int mlx_vector_array_append_value(mlx_vector_array vec, const mlx_array a) {
    return vec.ctx != NULL && PyList_Append(vec.ctx, of(a)) == 0 ? 0 : fail();
}

mlx_vector_array mlx_vector_array_new_data(const mlx_array *data, size_t size) {
    mlx_vector_array vec = mlx_vector_array_new();
    for (size_t i = 0; i < size; i++) (void)mlx_vector_array_append_value(vec, data[i]);
    return vec;
}

mlx_vector_array mlx_vector_array_new_value(const mlx_array a) { return mlx_vector_array_new_data(&a, 1); }

int mlx_vector_array_free(mlx_vector_array vec) {
    Py_XDECREF((PyObject *)vec.ctx);
    return 0;
}

int mlx_vector_array_get(mlx_array *res, const mlx_vector_array vec, size_t idx) {
    PyObject *array = PyList_GetItem(vec.ctx, (Py_ssize_t)idx);
    Py_XINCREF(array);
    return put(res, array);
}

/* Takes the reference of a list or tuple of arrays. */
static int put_all(mlx_vector_array *res, PyObject *arrays) {
    PyObject *list = arrays != NULL ? PySequence_List(arrays) : NULL;
    Py_XDECREF(arrays);
    if (list == NULL) return fail();
    Py_XDECREF((PyObject *)res->ctx);
    res->ctx = list;
    return 0;
}

mlx_vector_string mlx_vector_string_new(void) { return (mlx_vector_string){PyList_New(0)}; }

int mlx_vector_string_append_value(mlx_vector_string vec, const char *text) {
    PyObject *string = PyUnicode_FromString(text);
    const int code = string != NULL && vec.ctx != NULL && PyList_Append(vec.ctx, string) == 0 ? 0 : fail();
    Py_XDECREF(string);
    return code;
}

int mlx_vector_string_free(mlx_vector_string vec) {
    Py_XDECREF((PyObject *)vec.ctx);
    return 0;
}

/* ---- devices and streams: the ones that are current ---- */

mlx_device mlx_device_new(void) { return (mlx_device){NULL}; }
mlx_stream mlx_stream_new(void) { return (mlx_stream){NULL}; }

int mlx_device_free(mlx_device dev) {
    (void)dev;
    return 0;
}

int mlx_stream_free(mlx_stream stream) {
    (void)stream;
    return 0;
}

int mlx_get_default_device(mlx_device *dev) {
    (void)dev;
    return 0;
}

int mlx_get_default_stream(mlx_stream *stream, mlx_device dev) {
    (void)stream;
    (void)dev;
    return 0;
}

int mlx_stream_set(mlx_stream *stream, const mlx_stream src) {
    *stream = src;
    return 0;
}

int mlx_stream_get_device(mlx_device *dev, mlx_stream stream) {
    (void)dev;
    (void)stream;
    return 0;
}

int mlx_device_get_type(mlx_device_type *type, mlx_device dev) {
    (void)dev;
    PyObject *device = PyObject_CallObject(functions[FN_default_device], NULL);
    PyObject *found = device != NULL ? PyObject_GetAttrString(device, "type") : NULL;
    const int is_gpu = found != NULL ? PyObject_RichCompareBool(found, gpu, Py_EQ) : -1;
    Py_XDECREF(found);
    Py_XDECREF(device);
    if (is_gpu < 0) return fail();
    *type = is_gpu ? MLX_GPU : MLX_CPU;
    return 0;
}

int mlx_metal_is_available(bool *res) {
    PyObject *metal = PyObject_GetAttrString(core, "metal");
    PyObject *answer = metal != NULL ? PyObject_CallMethod(metal, "is_available", NULL) : NULL;
    const int is = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(metal);
    Py_XDECREF(answer);
    if (is < 0) return fail();
    *res = is != 0;
    return 0;
}

/* Takes the reference of a number. */
static int put_size(size_t *res, PyObject *number) {
    if (number == NULL) return fail();
    *res = PyLong_AsSize_t(number);
    Py_DECREF(number);
    return PyErr_Occurred() != NULL ? fail() : 0;
}

int mlx_get_active_memory(size_t *res) { return put_size(res, PyObject_CallObject(functions[FN_get_active_memory], NULL)); }

/* MLX 0.31 and earlier do not tell: the machine's memory is looked at instead. */
int mlx_get_memory_limit(size_t *res) { return put_size(res, PyObject_CallMethod(core, "get_memory_limit", NULL)); }

/* ---- operations ---- */

#define UNARY(name)                                                                                                              \
    int mlx_##name(mlx_array *res, const mlx_array a, const mlx_stream s) {                                                      \
        (void)s;                                                                                                                 \
        return put(res, CALL(name, of(a)));                                                                                      \
    }
#define BINARY(name)                                                                                                             \
    int mlx_##name(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s) {                                   \
        (void)s;                                                                                                                 \
        return put(res, CALL(name, of(a), of(b)));                                                                               \
    }
#define REDUCTION(name)                                                                                                          \
    int mlx_##name##_axis(mlx_array *res, const mlx_array a, int axis, bool keepdims, const mlx_stream s) {                      \
        (void)s;                                                                                                                 \
        return put(res, call_with_two(FN_##name, of(a), PyLong_FromLong(axis), PyBool_FromLong(keepdims)));                      \
    }

UNARY(abs)
UNARY(exp)
UNARY(isnan)
UNARY(sqrt)
UNARY(tanh)
BINARY(add)
BINARY(bitwise_and)
BINARY(divide)
BINARY(less)
BINARY(less_equal)
BINARY(logical_and)
BINARY(logical_or)
BINARY(matmul)
BINARY(maximum)
BINARY(minimum)
BINARY(multiply)
BINARY(right_shift)
BINARY(subtract)
REDUCTION(max)
REDUCTION(min)
REDUCTION(sum)

int mlx_arange(mlx_array *res, double start, double stop, double step, mlx_dtype dtype, const mlx_stream s) {
    (void)s;
    PyObject *args = Py_BuildValue("(LLLO)", (long long)start, (long long)stop, (long long)step, types[dtype]);
    PyObject *made = args != NULL ? PyObject_CallObject(functions[FN_arange], args) : NULL;
    Py_XDECREF(args);
    return put(res, made);
}

int mlx_as_strided(mlx_array *res, const mlx_array a, const int *shape, size_t shape_num, const int64_t *strides,
                   size_t strides_num, size_t offset, const mlx_stream s) {
    (void)s;
    PyObject *steps = PyTuple_New((Py_ssize_t)strides_num);
    for (size_t i = 0; steps != NULL && i < strides_num; i++)
        (void)PyTuple_SetItem(steps, (Py_ssize_t)i, PyLong_FromLongLong(strides[i]));
    PyObject *args = steps != NULL ? Py_BuildValue("(ONNn)", of(a), tuple_of(shape, shape_num), steps, (Py_ssize_t)offset) : NULL;
    PyObject *made = args != NULL ? PyObject_CallObject(functions[FN_as_strided], args) : NULL;
    Py_XDECREF(args);
    return put(res, made);
}

int mlx_astype(mlx_array *res, const mlx_array a, mlx_dtype dtype, const mlx_stream s) {
    (void)s;
    return put(res, PyObject_CallMethod(of(a), "astype", "O", types[dtype]));
}

int mlx_view(mlx_array *res, const mlx_array a, mlx_dtype dtype, const mlx_stream s) {
    (void)s;
    return put(res, CALL(view, of(a), types[dtype]));
}

int mlx_concatenate_axis(mlx_array *res, const mlx_vector_array arrays, int axis, const mlx_stream s) {
    (void)s;
    return put(res, call_with(FN_concatenate, arrays.ctx, PyLong_FromLong(axis)));
}

int mlx_cumsum_axis(mlx_array *res, const mlx_array a, int axis, bool reverse, bool inclusive, mlx_optional_dtype dtype,
                    const mlx_stream s) {
    (void)s;
    (void)dtype;
    PyObject *args = Py_BuildValue("(O)", of(a));
    PyObject *named = Py_BuildValue("{sisOsO}", "axis", axis, "reverse", reverse ? Py_True : Py_False, "inclusive",
                                    inclusive ? Py_True : Py_False);
    PyObject *made = args != NULL && named != NULL ? PyObject_Call(functions[FN_cumsum], args, named) : NULL;
    Py_XDECREF(args);
    Py_XDECREF(named);
    return put(res, made);
}

int mlx_depends(mlx_vector_array *res, const mlx_vector_array inputs, const mlx_vector_array dependencies) {
    return put_all(res, CALL(depends, (PyObject *)inputs.ctx, (PyObject *)dependencies.ctx));
}

int mlx_hadamard_transform(mlx_array *res, const mlx_array a, mlx_optional_float scale, const mlx_stream s) {
    (void)s;
    if (!scale.has_value) return put(res, CALL(hadamard_transform, of(a)));
    return put(res, call_with(FN_hadamard_transform, of(a), PyFloat_FromDouble((double)scale.value)));
}

/* mode: affine, which is Python's default. */
int mlx_quantize(mlx_vector_array *res, const mlx_array w, mlx_optional_int group_size, mlx_optional_int bits, const char *mode,
                 const mlx_array global_scale, const mlx_stream s) {
    (void)mode;
    (void)global_scale;
    (void)s;
    return put_all(res, call_with_two(FN_quantize, of(w), PyLong_FromLong(group_size.value), PyLong_FromLong(bits.value)));
}

int mlx_quantized_matmul(mlx_array *res, const mlx_array x, const mlx_array w, const mlx_array scales, const mlx_array biases,
                         bool transpose, mlx_optional_int group_size, mlx_optional_int bits, const char *mode,
                         const mlx_stream s) {
    (void)mode;
    (void)s;
    PyObject *args = Py_BuildValue("(OOOOOii)", of(x), of(w), of(scales), of(biases), transpose ? Py_True : Py_False,
                                   group_size.value, bits.value);
    PyObject *made = args != NULL ? PyObject_CallObject(functions[FN_quantized_matmul], args) : NULL;
    Py_XDECREF(args);
    return put(res, made);
}

int mlx_reshape(mlx_array *res, const mlx_array a, const int *shape, size_t shape_num, const mlx_stream s) {
    (void)s;
    return put(res, call_with(FN_reshape, of(a), tuple_of(shape, shape_num)));
}

int mlx_transpose_axes(mlx_array *res, const mlx_array a, const int *axes, size_t axes_num, const mlx_stream s) {
    (void)s;
    return put(res, call_with(FN_transpose, of(a), tuple_of(axes, axes_num)));
}

int mlx_round(mlx_array *res, const mlx_array a, int decimals, const mlx_stream s) {
    (void)s;
    return put(res, call_with(FN_round, of(a), PyLong_FromLong(decimals)));
}

int mlx_take_axis(mlx_array *res, const mlx_array a, const mlx_array indices, int axis, const mlx_stream s) {
    (void)s;
    PyObject *number = PyLong_FromLong(axis);
    PyObject *made = number != NULL ? CALL(take, of(a), of(indices), number) : NULL;
    Py_XDECREF(number);
    return put(res, made);
}

int mlx_where(mlx_array *res, const mlx_array condition, const mlx_array x, const mlx_array y, const mlx_stream s) {
    (void)s;
    return put(res, CALL(where, of(condition), of(x), of(y)));
}

int mlx_zeros(mlx_array *res, const int *shape, size_t shape_num, mlx_dtype dtype, const mlx_stream s) {
    (void)s;
    PyObject *tuple = tuple_of(shape, shape_num);
    PyObject *made = tuple != NULL ? CALL(zeros, tuple, types[dtype]) : NULL;
    Py_XDECREF(tuple);
    return put(res, made);
}

static PyObject *one_slice(int start, int stop, int step) {
    PyObject *a = PyLong_FromLong(start);
    PyObject *b = PyLong_FromLong(stop);
    PyObject *c = PyLong_FromLong(step);
    PyObject *slice = a != NULL && b != NULL && c != NULL ? PySlice_New(a, b, c) : NULL;
    Py_XDECREF(a);
    Py_XDECREF(b);
    Py_XDECREF(c);
    return slice;
}

/* a[start:stop:step, ..] as Python's key. */
static PyObject *slices_of(const int *start, const int *stop, const int *steps, size_t n) {
    PyObject *key = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; key != NULL && i < n; i++)
        (void)PyTuple_SetItem(key, (Py_ssize_t)i, one_slice(start[i], stop[i], steps[i]));
    return key;
}

int mlx_slice(mlx_array *res, const mlx_array a, const int *start, size_t start_num, const int *stop, size_t stop_num,
              const int *strides, size_t strides_num, const mlx_stream s) {
    (void)stop_num;
    (void)strides_num;
    (void)s;
    PyObject *key = slices_of(start, stop, strides, start_num);
    PyObject *made = key != NULL ? PyObject_GetItem(of(a), key) : NULL;
    Py_XDECREF(key);
    return put(res, made);
}

/* Python's assignment to slices of a second object of the same array. */
int mlx_slice_update(mlx_array *res, const mlx_array src, const mlx_array update, const int *start, size_t start_num,
                     const int *stop, size_t stop_num, const int *strides, size_t strides_num, const mlx_stream s) {
    (void)stop_num;
    (void)strides_num;
    (void)s;
    PyObject *made = PyObject_CallMethod(of(src), "__copy__", NULL);
    PyObject *key = slices_of(start, stop, strides, start_num);
    if (made != NULL && (key == NULL || PyObject_SetItem(made, key, of(update)) != 0)) {
        Py_DECREF(made);
        made = NULL;
    }
    Py_XDECREF(key);
    return put(res, made);
}

/* ---- kernels: mx.fast.metal_kernel and cuda_kernel, called with a dict of their arguments ---- */

/* Takes the reference of the last argument, which only one of the two makers has: MLX wants True where a bool is meant, not 1. */
static void *kernel_new(const char *maker, const char *name, mlx_vector_string inputs, mlx_vector_string outputs,
                        const char *source, const char *header, bool contiguous, const char *extra, PyObject *value) {
    PyObject *fast = PyObject_GetAttrString(core, "fast");
    PyObject *make = fast != NULL ? PyObject_GetAttrString(fast, maker) : NULL;
    PyObject *args = PyTuple_New(0);
    PyObject *named = Py_BuildValue("{sssOsOsssssOsN}", "name", name, "input_names", (PyObject *)inputs.ctx, "output_names",
                                    (PyObject *)outputs.ctx, "source", source, "header", header, "ensure_row_contiguous",
                                    contiguous ? Py_True : Py_False, extra, value);
    PyObject *kernel = make != NULL && args != NULL && named != NULL ? PyObject_Call(make, args, named) : NULL;
    Py_XDECREF(fast);
    Py_XDECREF(make);
    Py_XDECREF(args);
    Py_XDECREF(named);
    if (kernel == NULL) (void)fail();
    return kernel;
}

static int kernel_apply(mlx_vector_array *outputs, void *kernel, mlx_vector_array inputs, void *config) {
    PyObject *args = PyTuple_New(0);
    PyObject *made =
        args != NULL && PyDict_SetItemString(config, "inputs", inputs.ctx) == 0 ? PyObject_Call(kernel, args, config) : NULL;
    (void)PyDict_DelItemString(config, "inputs"); /* the config outlives the call, its arrays must not */
    Py_XDECREF(args);
    return put_all(outputs, made);
}

/* One output; takes the reference of the value. */
static int set_item(void *config, const char *key, PyObject *value) {
    const int code = config != NULL && value != NULL ? PyDict_SetItemString(config, key, value) : -1;
    Py_XDECREF(value);
    return code == 0 ? 0 : fail();
}

static int add_output(void *config, const int *shape, size_t size, mlx_dtype dtype) {
    return set_item(config, "output_shapes", Py_BuildValue("[N]", tuple_of(shape, size))) |
           set_item(config, "output_dtypes", Py_BuildValue("[O]", types[dtype]));
}

#define KERNELS(device, extra_type, extra_name, object_of)                                                                       \
    mlx_fast_##device##_kernel mlx_fast_##device##_kernel_new(                                                                   \
        const char *name, const mlx_vector_string input_names, const mlx_vector_string output_names, const char *source,         \
        const char *header, bool ensure_row_contiguous, extra_type extra) {                                                      \
        return (mlx_fast_##device##_kernel){kernel_new(#device "_kernel", name, input_names, output_names, source, header,       \
                                                       ensure_row_contiguous, extra_name, object_of(extra))};                    \
    }                                                                                                                            \
    void mlx_fast_##device##_kernel_free(mlx_fast_##device##_kernel cls) { Py_XDECREF((PyObject *)cls.ctx); }                    \
    int mlx_fast_##device##_kernel_apply(mlx_vector_array *outputs, mlx_fast_##device##_kernel cls,                              \
                                         const mlx_vector_array inputs, const mlx_fast_##device##_kernel_config config,          \
                                         const mlx_stream stream) {                                                              \
        (void)stream;                                                                                                            \
        return kernel_apply(outputs, cls.ctx, inputs, config.ctx);                                                               \
    }                                                                                                                            \
    mlx_fast_##device##_kernel_config mlx_fast_##device##_kernel_config_new(void) {                                              \
        return (mlx_fast_##device##_kernel_config){PyDict_New()};                                                                \
    }                                                                                                                            \
    void mlx_fast_##device##_kernel_config_free(mlx_fast_##device##_kernel_config cls) { Py_XDECREF((PyObject *)cls.ctx); }      \
    int mlx_fast_##device##_kernel_config_add_output_arg(mlx_fast_##device##_kernel_config cls, const int *shape, size_t size,   \
                                                         mlx_dtype dtype) {                                                      \
        return add_output(cls.ctx, shape, size, dtype);                                                                          \
    }                                                                                                                            \
    int mlx_fast_##device##_kernel_config_set_grid(mlx_fast_##device##_kernel_config cls, int grid1, int grid2, int grid3) {     \
        return set_item(cls.ctx, "grid", Py_BuildValue("(iii)", grid1, grid2, grid3));                                           \
    }                                                                                                                            \
    int mlx_fast_##device##_kernel_config_set_thread_group(mlx_fast_##device##_kernel_config cls, int thread1, int thread2,      \
                                                           int thread3) {                                                        \
        return set_item(cls.ctx, "threadgroup", Py_BuildValue("(iii)", thread1, thread2, thread3));                              \
    }

KERNELS(cuda, int, "shared_memory", PyLong_FromLong)
KERNELS(metal, bool, "atomic_outputs", PyBool_FromLong)
