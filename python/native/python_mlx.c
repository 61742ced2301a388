/* Implements the subset of mlx-c that src/mlx calls (native/mlx/c/mlx.h) over the mlx.core module of the Python process.
 *
 * MLX is not linked, so one binary works with every MLX that has the functions listed below and with every Python of the stable
 * ABI. An mlx_array owns a reference to an mx.array, a vector is a list, and a kernel configuration is a dict of keyword
 * arguments. Stream arguments are ignored: operations run on the current stream of Python, like the operations of the model.
 *
 * The caller must hold the GIL. An exception in MLX is reported to mlx-c's error handler and returned as a nonzero code.
 */
#include "python_mlx.h"

#include <stdlib.h>
#include <string.h>

/* ---- mlx.core ---- */

/* Required functions of mlx.core. */
/* clang-format off */
#define FUNCTIONS(F) \
    F(abs) F(add) F(arange) F(array) F(as_strided) F(bitwise_and) F(concatenate) F(contiguous) F(cumsum) F(default_device) F(depends) F(divide) \
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

static PyObject *core; /* mlx.core, or NULL before fkv_python_mlx_open() */
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
        if (types[i] == NULL) PyErr_Clear(); /* older versions lack some types; required types are checked below */
    }
    gpu = PyObject_GetAttrString(module, "gpu");
    if (gpu == NULL && missing == NULL) missing = "gpu";
    static const mlx_dtype required[] = {MLX_UINT16, MLX_UINT32, MLX_INT32, MLX_FLOAT16, MLX_FLOAT32, MLX_BFLOAT16};
    for (size_t i = 0; i < sizeof required / sizeof required[0] && missing == NULL; i++)
        if (types[required[i]] == NULL) missing = type_names[required[i]];
    if (missing != NULL) {
        Py_DECREF(module);
        PyErr_Clear();
        PyErr_Format(PyExc_ImportError, "flatkv requires mlx.core.%s, which this version of MLX lacks; run pip install -U mlx",
                     missing);
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

static void report_error(const char *message) {
    if (handler != NULL) handler(message, handler_data);
}

/* Reports and clears the current exception. Returns 1. */
static int report_exception(void) {
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *trace = NULL;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value != NULL ? PyObject_Str(value) : NULL;
    PyObject *bytes = text != NULL ? PyUnicode_AsUTF8String(text) : NULL;
    const char *message = bytes != NULL ? PyBytes_AsString(bytes) : NULL;
    report_error(message != NULL ? message : "exception without a message");
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
    PyObject *bytes; /* data returned by an mlx_array_data function, or NULL */
    int n_dims;      /* -1 until the shape is read */
    int type;        /* -1 until the type is read */
    int shape[MAX_DIMS];
} holder;

static holder *holder_of(mlx_array a) { return a.ctx; }

PyObject *fkv_python_mlx_object(mlx_array a) { return a.ctx != NULL ? holder_of(a)->array : NULL; }

/* Wraps array in a handle and steals the reference, also on failure. */
static mlx_array wrap_reference(PyObject *array) {
    holder *h = malloc(sizeof *h);
    if (h == NULL) {
        Py_DECREF(array);
        (void)PyErr_NoMemory();
        return (mlx_array){NULL};
    }
    *h = (holder){.array = array, .n_dims = -1, .type = -1};
    return (mlx_array){h};
}

mlx_array fkv_python_mlx_wrap(PyObject *array) {
    Py_INCREF(array);
    return wrap_reference(array);
}

/* Stores array in *res and steals the reference. If array is NULL, reports the current exception and returns 1. */
static int set_result(mlx_array *res, PyObject *array) {
    if (array == NULL) return report_exception();
    mlx_array made = wrap_reference(array);
    if (made.ctx == NULL) return report_exception();
    (void)mlx_array_free(*res);
    *res = made;
    return 0;
}

static mlx_array made_or_empty(PyObject *array) {
    mlx_array a = {NULL};
    (void)set_result(&a, array);
    return a;
}

int mlx_array_free(mlx_array a) {
    if (a.ctx == NULL) return 0;
    Py_DECREF(holder_of(a)->array);
    Py_XDECREF(holder_of(a)->bytes);
    free(a.ctx);
    return 0;
}

int mlx_array_set(mlx_array *arr, const mlx_array src) {
    if (src.ctx == NULL) {
        report_error("mlx_array_set: the source array is empty");
        return 1;
    }
    PyObject *array = holder_of(src)->array;
    Py_INCREF(array);
    return set_result(arr, array);
}

/* Returns the holder after reading the shape of its array. */
static holder *holder_with_shape(mlx_array a) {
    holder *h = holder_of(a);
    if (h->n_dims >= 0) return h;
    PyObject *shape = PyObject_GetAttr(h->array, shape_name);
    h->n_dims = shape != NULL ? (int)PyTuple_Size(shape) : 0;
    if (h->n_dims > MAX_DIMS) h->n_dims = MAX_DIMS;
    for (int i = 0; i < h->n_dims; i++) h->shape[i] = (int)PyLong_AsLong(PyTuple_GetItem(shape, i));
    Py_XDECREF(shape);
    PyErr_Clear();
    return h;
}

const int *mlx_array_shape(const mlx_array a) { return holder_with_shape(a)->shape; }
size_t mlx_array_ndim(const mlx_array a) { return (size_t)holder_with_shape(a)->n_dims; }

size_t mlx_array_size(const mlx_array a) {
    const holder *h = holder_with_shape(a);
    size_t n = 1;
    for (int i = 0; i < h->n_dims; i++) n *= (size_t)h->shape[i];
    return n;
}

mlx_dtype mlx_array_dtype(const mlx_array a) {
    static const mlx_dtype likely[] = {MLX_FLOAT32, MLX_BFLOAT16, MLX_FLOAT16, MLX_UINT16, MLX_UINT32};
    holder *h = holder_of(a);
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

static PyObject *object_or_none(mlx_array a) { return a.ctx != NULL ? holder_of(a)->array : Py_None; }

static PyObject *tuple_of(const int *numbers, size_t n) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; tuple != NULL && i < n; i++) (void)PyTuple_SetItem(tuple, (Py_ssize_t)i, PyLong_FromLong(numbers[i]));
    return tuple;
}

/* Calls a function with a borrowed argument and one new reference, which is released. A NULL reference is an earlier failure. */
static PyObject *call_with(function f, PyObject *a, PyObject *second) {
    PyObject *result = second != NULL ? PyObject_CallFunctionObjArgs(functions[f], a, second, NULL) : NULL;
    Py_XDECREF(second);
    return result;
}

static PyObject *call_with_two(function f, PyObject *a, PyObject *first, PyObject *second) {
    PyObject *result =
        first != NULL && second != NULL ? PyObject_CallFunctionObjArgs(functions[f], a, first, second, NULL) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return result;
}

/* Creates an array through a memoryview, which supports only the types with a format below. */
mlx_array mlx_array_new_data(const void *data, const int *shape, int dim, mlx_dtype dtype) {
    static const char *const formats[N_TYPES] = {
        [MLX_UINT8] = "B", [MLX_UINT16] = "H", [MLX_UINT32] = "I", [MLX_INT32] = "i", [MLX_FLOAT32] = "f"};
    if (formats[dtype] == NULL) {
        report_error("mlx_array_new_data: unsupported data type (expected uint8, uint16, uint32, int32 or float32)");
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
    PyObject *none = CALL(eval, object_or_none(a));
    if (none == NULL) return report_exception();
    Py_DECREF(none);
    return 0;
}

/* Copies the data into a bytes object that the handle owns, because the stable ABI of Python 3.10 lacks the buffer protocol. */
static const void *data_of(const mlx_array a) {
    holder *h = holder_of(a);
    PyObject *view = PyMemoryView_FromObject(h->array);
    PyObject *bytes = view != NULL ? PyObject_CallMethod(view, "tobytes", NULL) : NULL;
    Py_XDECREF(view);
    if (bytes == NULL) {
        (void)report_exception();
        return NULL;
    }
    Py_XDECREF(h->bytes);
    h->bytes = bytes;
    return PyBytes_AsString(bytes);
}

const uint16_t *mlx_array_data_uint16(const mlx_array a) { return data_of(a); }
const float *mlx_array_data_float32(const mlx_array a) { return data_of(a); }

/* Always true: src/mlx calls this only for pools, which are evaluated zeros. */
int _mlx_array_is_row_contiguous(bool *res, const mlx_array a) {
    (void)a;
    *res = true;
    return 0;
}

/* ---- vectors ---- */

mlx_vector_array mlx_vector_array_new(void) { return (mlx_vector_array){PyList_New(0)}; }

int mlx_vector_array_append_value(mlx_vector_array vec, const mlx_array a) {
    return vec.ctx != NULL && PyList_Append(vec.ctx, object_or_none(a)) == 0 ? 0 : report_exception();
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

size_t mlx_vector_array_size(mlx_vector_array vec) { return (size_t)PyList_Size(vec.ctx); }

int mlx_vector_array_get(mlx_array *res, const mlx_vector_array vec, size_t idx) {
    PyObject *array = PyList_GetItem(vec.ctx, (Py_ssize_t)idx);
    Py_XINCREF(array);
    return set_result(res, array);
}

/* Stores a list or tuple of arrays in *res and steals the reference. */
static int set_results(mlx_vector_array *res, PyObject *arrays) {
    PyObject *list = arrays != NULL ? PySequence_List(arrays) : NULL;
    Py_XDECREF(arrays);
    if (list == NULL) return report_exception();
    Py_XDECREF((PyObject *)res->ctx);
    res->ctx = list;
    return 0;
}

mlx_vector_string mlx_vector_string_new(void) { return (mlx_vector_string){PyList_New(0)}; }

int mlx_vector_string_append_value(mlx_vector_string vec, const char *text) {
    PyObject *string = PyUnicode_FromString(text);
    const int code = string != NULL && vec.ctx != NULL && PyList_Append(vec.ctx, string) == 0 ? 0 : report_exception();
    Py_XDECREF(string);
    return code;
}

int mlx_vector_string_free(mlx_vector_string vec) {
    Py_XDECREF((PyObject *)vec.ctx);
    return 0;
}

/* ---- devices and streams (always the current ones) ---- */

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
    if (is_gpu < 0) return report_exception();
    *type = is_gpu ? MLX_GPU : MLX_CPU;
    return 0;
}

int mlx_metal_is_available(bool *res) {
    PyObject *metal = PyObject_GetAttrString(core, "metal");
    PyObject *result = metal != NULL ? PyObject_CallMethod(metal, "is_available", NULL) : NULL;
    const int available = result != NULL ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(metal);
    Py_XDECREF(result);
    if (available < 0) return report_exception();
    *res = available != 0;
    return 0;
}

/* Stores a Python integer in *res and releases the reference. */
static int set_size(size_t *res, PyObject *number) {
    if (number == NULL) return report_exception();
    *res = PyLong_AsSize_t(number);
    Py_DECREF(number);
    return PyErr_Occurred() != NULL ? report_exception() : 0;
}

int mlx_get_active_memory(size_t *res) { return set_size(res, PyObject_CallObject(functions[FN_get_active_memory], NULL)); }

/* Fails with MLX 0.31 and earlier, which lack this function; the caller then uses the memory of the machine. */
int mlx_get_memory_limit(size_t *res) { return set_size(res, PyObject_CallMethod(core, "get_memory_limit", NULL)); }

/* ---- operations ---- */

#define UNARY(name)                                                                                                              \
    int mlx_##name(mlx_array *res, const mlx_array a, const mlx_stream s) {                                                      \
        (void)s;                                                                                                                 \
        return set_result(res, CALL(name, object_or_none(a)));                                                                   \
    }
#define BINARY(name)                                                                                                             \
    int mlx_##name(mlx_array *res, const mlx_array a, const mlx_array b, const mlx_stream s) {                                   \
        (void)s;                                                                                                                 \
        return set_result(res, CALL(name, object_or_none(a), object_or_none(b)));                                                \
    }
#define REDUCTION(name)                                                                                                          \
    int mlx_##name##_axis(mlx_array *res, const mlx_array a, int axis, bool keepdims, const mlx_stream s) {                      \
        (void)s;                                                                                                                 \
        return set_result(res, call_with_two(FN_##name, object_or_none(a), PyLong_FromLong(axis), PyBool_FromLong(keepdims)));   \
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
    return set_result(res, made);
}

int mlx_as_strided(mlx_array *res, const mlx_array a, const int *shape, size_t shape_num, const int64_t *strides,
                   size_t strides_num, size_t offset, const mlx_stream s) {
    (void)s;
    PyObject *steps = PyTuple_New((Py_ssize_t)strides_num);
    for (size_t i = 0; steps != NULL && i < strides_num; i++)
        (void)PyTuple_SetItem(steps, (Py_ssize_t)i, PyLong_FromLongLong(strides[i]));
    PyObject *args =
        steps != NULL ? Py_BuildValue("(ONNn)", object_or_none(a), tuple_of(shape, shape_num), steps, (Py_ssize_t)offset) : NULL;
    PyObject *made = args != NULL ? PyObject_CallObject(functions[FN_as_strided], args) : NULL;
    Py_XDECREF(args);
    return set_result(res, made);
}

int mlx_astype(mlx_array *res, const mlx_array a, mlx_dtype dtype, const mlx_stream s) {
    (void)s;
    return set_result(res, PyObject_CallMethod(object_or_none(a), "astype", "O", types[dtype]));
}

int mlx_view(mlx_array *res, const mlx_array a, mlx_dtype dtype, const mlx_stream s) {
    (void)s;
    return set_result(res, CALL(view, object_or_none(a), types[dtype]));
}

int mlx_concatenate_axis(mlx_array *res, const mlx_vector_array arrays, int axis, const mlx_stream s) {
    (void)s;
    return set_result(res, call_with(FN_concatenate, arrays.ctx, PyLong_FromLong(axis)));
}

int mlx_cumsum_axis(mlx_array *res, const mlx_array a, int axis, bool reverse, bool inclusive, mlx_optional_dtype dtype,
                    const mlx_stream s) {
    (void)s;
    (void)dtype;
    PyObject *args = Py_BuildValue("(O)", object_or_none(a));
    PyObject *named = Py_BuildValue("{sisOsO}", "axis", axis, "reverse", reverse ? Py_True : Py_False, "inclusive",
                                    inclusive ? Py_True : Py_False);
    PyObject *made = args != NULL && named != NULL ? PyObject_Call(functions[FN_cumsum], args, named) : NULL;
    Py_XDECREF(args);
    Py_XDECREF(named);
    return set_result(res, made);
}

int mlx_depends(mlx_vector_array *res, const mlx_vector_array inputs, const mlx_vector_array dependencies) {
    return set_results(res, CALL(depends, (PyObject *)inputs.ctx, (PyObject *)dependencies.ctx));
}

int mlx_hadamard_transform(mlx_array *res, const mlx_array a, mlx_optional_float scale, const mlx_stream s) {
    (void)s;
    if (!scale.has_value) return set_result(res, CALL(hadamard_transform, object_or_none(a)));
    return set_result(res, call_with(FN_hadamard_transform, object_or_none(a), PyFloat_FromDouble((double)scale.value)));
}

/* mode is always affine, the default in Python. */
int mlx_quantize(mlx_vector_array *res, const mlx_array w, mlx_optional_int group_size, mlx_optional_int bits, const char *mode,
                 const mlx_array global_scale, const mlx_stream s) {
    (void)mode;
    (void)global_scale;
    (void)s;
    return set_results(
        res, call_with_two(FN_quantize, object_or_none(w), PyLong_FromLong(group_size.value), PyLong_FromLong(bits.value)));
}

int mlx_quantized_matmul(mlx_array *res, const mlx_array x, const mlx_array w, const mlx_array scales, const mlx_array biases,
                         bool transpose, mlx_optional_int group_size, mlx_optional_int bits, const char *mode,
                         const mlx_stream s) {
    (void)mode;
    (void)s;
    PyObject *args = Py_BuildValue("(OOOOOii)", object_or_none(x), object_or_none(w), object_or_none(scales),
                                   object_or_none(biases), transpose ? Py_True : Py_False, group_size.value, bits.value);
    PyObject *made = args != NULL ? PyObject_CallObject(functions[FN_quantized_matmul], args) : NULL;
    Py_XDECREF(args);
    return set_result(res, made);
}

int mlx_contiguous(mlx_array *res, const mlx_array a, bool allow_col_major, const mlx_stream s) {
    (void)s;
    return set_result(res, call_with(FN_contiguous, object_or_none(a), PyBool_FromLong(allow_col_major)));
}

int mlx_reshape(mlx_array *res, const mlx_array a, const int *shape, size_t shape_num, const mlx_stream s) {
    (void)s;
    return set_result(res, call_with(FN_reshape, object_or_none(a), tuple_of(shape, shape_num)));
}

int mlx_transpose_axes(mlx_array *res, const mlx_array a, const int *axes, size_t axes_num, const mlx_stream s) {
    (void)s;
    return set_result(res, call_with(FN_transpose, object_or_none(a), tuple_of(axes, axes_num)));
}

int mlx_round(mlx_array *res, const mlx_array a, int decimals, const mlx_stream s) {
    (void)s;
    return set_result(res, call_with(FN_round, object_or_none(a), PyLong_FromLong(decimals)));
}

int mlx_take_axis(mlx_array *res, const mlx_array a, const mlx_array indices, int axis, const mlx_stream s) {
    (void)s;
    PyObject *number = PyLong_FromLong(axis);
    PyObject *made = number != NULL ? CALL(take, object_or_none(a), object_or_none(indices), number) : NULL;
    Py_XDECREF(number);
    return set_result(res, made);
}

int mlx_where(mlx_array *res, const mlx_array condition, const mlx_array x, const mlx_array y, const mlx_stream s) {
    (void)s;
    return set_result(res, CALL(where, object_or_none(condition), object_or_none(x), object_or_none(y)));
}

int mlx_zeros(mlx_array *res, const int *shape, size_t shape_num, mlx_dtype dtype, const mlx_stream s) {
    (void)s;
    PyObject *tuple = tuple_of(shape, shape_num);
    PyObject *made = tuple != NULL ? CALL(zeros, tuple, types[dtype]) : NULL;
    Py_XDECREF(tuple);
    return set_result(res, made);
}

static PyObject *new_slice(int start, int stop, int step) {
    PyObject *a = PyLong_FromLong(start);
    PyObject *b = PyLong_FromLong(stop);
    PyObject *c = PyLong_FromLong(step);
    PyObject *slice = a != NULL && b != NULL && c != NULL ? PySlice_New(a, b, c) : NULL;
    Py_XDECREF(a);
    Py_XDECREF(b);
    Py_XDECREF(c);
    return slice;
}

/* Returns the index tuple of a[start:stop:step, ..]. */
static PyObject *slice_key(const int *start, const int *stop, const int *steps, size_t n) {
    PyObject *key = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; key != NULL && i < n; i++)
        (void)PyTuple_SetItem(key, (Py_ssize_t)i, new_slice(start[i], stop[i], steps[i]));
    return key;
}

int mlx_slice(mlx_array *res, const mlx_array a, const int *start, size_t start_num, const int *stop, size_t stop_num,
              const int *strides, size_t strides_num, const mlx_stream s) {
    (void)stop_num;
    (void)strides_num;
    (void)s;
    PyObject *key = slice_key(start, stop, strides, start_num);
    PyObject *made = key != NULL ? PyObject_GetItem(object_or_none(a), key) : NULL;
    Py_XDECREF(key);
    return set_result(res, made);
}

/* Assigns to slices of a copy of the array object, so that src is unchanged. */
int mlx_slice_update(mlx_array *res, const mlx_array src, const mlx_array update, const int *start, size_t start_num,
                     const int *stop, size_t stop_num, const int *strides, size_t strides_num, const mlx_stream s) {
    (void)stop_num;
    (void)strides_num;
    (void)s;
    PyObject *made = PyObject_CallMethod(object_or_none(src), "__copy__", NULL);
    PyObject *key = slice_key(start, stop, strides, start_num);
    if (made != NULL && (key == NULL || PyObject_SetItem(made, key, object_or_none(update)) != 0)) {
        Py_DECREF(made);
        made = NULL;
    }
    Py_XDECREF(key);
    return set_result(res, made);
}

/* ---- custom kernels (mx.fast.metal_kernel and mx.fast.cuda_kernel) ---- */

/* Creates a kernel. extra and value are the keyword argument that only this constructor has; value is a new reference, which is
 * released, and must be a Python bool for a bool parameter. */
static void *kernel_new(const char *constructor, const char *name, mlx_vector_string inputs, mlx_vector_string outputs,
                        const char *source, const char *header, bool contiguous, const char *extra, PyObject *value) {
    PyObject *fast = PyObject_GetAttrString(core, "fast");
    PyObject *make = fast != NULL ? PyObject_GetAttrString(fast, constructor) : NULL;
    PyObject *args = PyTuple_New(0);
    PyObject *named = Py_BuildValue("{sssOsOsssssOsN}", "name", name, "input_names", (PyObject *)inputs.ctx, "output_names",
                                    (PyObject *)outputs.ctx, "source", source, "header", header, "ensure_row_contiguous",
                                    contiguous ? Py_True : Py_False, extra, value);
    PyObject *kernel = make != NULL && args != NULL && named != NULL ? PyObject_Call(make, args, named) : NULL;
    Py_XDECREF(fast);
    Py_XDECREF(make);
    Py_XDECREF(args);
    Py_XDECREF(named);
    if (kernel == NULL) (void)report_exception();
    return kernel;
}

static int kernel_apply(mlx_vector_array *outputs, void *kernel, mlx_vector_array inputs, void *config) {
    PyObject *args = PyTuple_New(0);
    PyObject *made =
        args != NULL && PyDict_SetItemString(config, "inputs", inputs.ctx) == 0 ? PyObject_Call(kernel, args, config) : NULL;
    (void)PyDict_DelItemString(config, "inputs"); /* the configuration is reused and must not keep the arrays alive */
    Py_XDECREF(args);
    return set_results(outputs, made);
}

/* Sets one entry of a configuration and releases the reference to value. */
static int set_item(void *config, const char *key, PyObject *value) {
    const int code = config != NULL && value != NULL ? PyDict_SetItemString(config, key, value) : -1;
    Py_XDECREF(value);
    return code == 0 ? 0 : report_exception();
}

/* Appends a value to a list in a configuration and releases the reference to value. */
static int append_item(void *config, const char *key, PyObject *value) {
    PyObject *list = config != NULL ? PyDict_GetItemString(config, key) : NULL; /* a borrowed reference */
    if (list == NULL) return set_item(config, key, Py_BuildValue("[N]", value));
    const int code = value != NULL ? PyList_Append(list, value) : -1;
    Py_XDECREF(value);
    return code == 0 ? 0 : report_exception();
}

static int add_output(void *config, const int *shape, size_t size, mlx_dtype dtype) {
    return append_item(config, "output_shapes", tuple_of(shape, size)) |
           append_item(config, "output_dtypes", Py_BuildValue("O", types[dtype]));
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
