/* flatkv._native: extension module for the stable ABI that contains libflatkv and its MLX backend. Python calls most C functions
 * through ctypes (flatkv/_library.py). This file has the functions with mx.array arguments or results, which run for every layer
 * of every step.
 *
 * Steps are passed as integer addresses. Functions return an fkv_status on failure, and the caller reads fkv_message().
 */
#define PY_SSIZE_T_CLEAN /* lengths are Py_ssize_t */
#include "python_mlx.h"

#include <flatkv/mlx.h>

static PyObject *mlx_open(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    if (fkv_python_mlx_open() != 0) return NULL;
    Py_RETURN_NONE;
}

/* mlx_write(step, layer, k, v) -> status */
static PyObject *mlx_write(PyObject *self, PyObject *args) {
    unsigned long long step = 0;
    unsigned layer = 0;
    PyObject *k = NULL;
    PyObject *v = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "KIOO", &step, &layer, &k, &v)) return NULL;
    mlx_array keys = fkv_python_mlx_wrap(k);
    mlx_array values = fkv_python_mlx_wrap(v);
    PyObject *status = NULL;
    if (keys.ctx != NULL && values.ctx != NULL)
        status = PyLong_FromLong(fkv_mlx_write((fkv_step *)(uintptr_t)step, layer, keys, values));
    (void)mlx_array_free(keys);
    (void)mlx_array_free(values);
    return status;
}

/* mlx_attend(step, layer, q) -> mx.array, or a nonzero status */
static PyObject *mlx_attend(PyObject *self, PyObject *args) {
    unsigned long long step = 0;
    unsigned layer = 0;
    PyObject *q = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "KIO", &step, &layer, &q)) return NULL;
    mlx_array queries = fkv_python_mlx_wrap(q);
    if (queries.ctx == NULL) return NULL;
    mlx_array out = {NULL};
    const fkv_status status = fkv_mlx_attend((fkv_step *)(uintptr_t)step, layer, queries, &out);
    PyObject *result = status == FKV_OK ? fkv_python_mlx_object(out) : NULL;
    Py_XINCREF(result);
    (void)mlx_array_free(queries);
    (void)mlx_array_free(out);
    return result != NULL ? result : PyLong_FromLong(status);
}

/* mlx_fetch(step, layer, row) -> (keys, values), or a nonzero status */
static PyObject *mlx_fetch(PyObject *self, PyObject *args) {
    unsigned long long step = 0;
    unsigned layer = 0;
    unsigned row = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "KII", &step, &layer, &row)) return NULL;
    mlx_array k = {NULL};
    mlx_array v = {NULL};
    const fkv_status status = fkv_mlx_fetch((fkv_step *)(uintptr_t)step, layer, row, &k, &v);
    PyObject *result = status == FKV_OK ? Py_BuildValue("(OO)", fkv_python_mlx_object(k), fkv_python_mlx_object(v)) : NULL;
    (void)mlx_array_free(k);
    (void)mlx_array_free(v);
    return status == FKV_OK ? result : PyLong_FromLong(status);
}

/* mlx_product(x, codes, scales, biases, group, bits) -> mx.array, or a nonzero status */
static PyObject *mlx_product(PyObject *self, PyObject *args) {
    PyObject *given[4] = {NULL};
    unsigned group = 0;
    unsigned bits = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOII", &given[0], &given[1], &given[2], &given[3], &group, &bits)) return NULL;
    mlx_array arrays[4] = {{NULL}};
    bool wrapped = true;
    for (int i = 0; i < 4 && wrapped; i++) {
        arrays[i] = fkv_python_mlx_wrap(given[i]);
        wrapped = arrays[i].ctx != NULL;
    }
    mlx_array out = {NULL};
    fkv_status status = FKV_NO_MEMORY;
    if (wrapped)
        status = fkv_mlx_quantized_product(arrays[0], arrays[1], arrays[2], arrays[3], group, bits, (mlx_stream){NULL}, &out);
    PyObject *result = status == FKV_OK ? fkv_python_mlx_object(out) : NULL;
    Py_XINCREF(result);
    for (int i = 0; i < 4; i++) (void)mlx_array_free(arrays[i]);
    (void)mlx_array_free(out);
    if (!wrapped) return NULL;
    return result != NULL ? result : PyLong_FromLong(status);
}

/* mlx_pending(step) -> list of mx.array, or a nonzero status */
static PyObject *mlx_pending(PyObject *self, PyObject *args) {
    unsigned long long step = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "K", &step)) return NULL;
    mlx_vector_array arrays = mlx_vector_array_new();
    if (arrays.ctx == NULL) return NULL;
    const fkv_status status = fkv_mlx_step_pending((fkv_step *)(uintptr_t)step, arrays);
    if (status == FKV_OK) return arrays.ctx;
    (void)mlx_vector_array_free(arrays);
    return PyLong_FromLong(status);
}

enum { MAX_TABLES = 64 }; /* maximum number of page tables in one step */

/* mlx_step_state(step) -> (graph key as bytes, list of page tables and dependency arrays), or a nonzero status */
static PyObject *mlx_step_state(PyObject *self, PyObject *args) {
    unsigned long long step = 0;
    uint32_t form[MAX_TABLES * FKV_MLX_FORM_WORDS];
    uint32_t n_tables = MAX_TABLES;
    (void)self;
    if (!PyArg_ParseTuple(args, "K", &step)) return NULL;
    mlx_vector_array arrays = mlx_vector_array_new();
    if (arrays.ctx == NULL) return NULL;
    const fkv_status status = fkv_mlx_step_state((fkv_step *)(uintptr_t)step, arrays, form, &n_tables);
    if (status == FKV_OK) {
        const Py_ssize_t n = (Py_ssize_t)(n_tables * FKV_MLX_FORM_WORDS * sizeof form[0]);
        return Py_BuildValue("(y#N)", (const char *)form, n, (PyObject *)arrays.ctx);
    }
    (void)mlx_vector_array_free(arrays);
    return PyLong_FromLong(status);
}

/* mlx_step_put_state(step, list of page tables and dependency arrays, replayed) -> status */
static PyObject *mlx_step_put_state(PyObject *self, PyObject *args) {
    unsigned long long step = 0;
    PyObject *arrays = NULL;
    int replayed = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "KO!p", &step, &PyList_Type, &arrays, &replayed)) return NULL;
    return PyLong_FromLong(fkv_mlx_step_put_state((fkv_step *)(uintptr_t)step, (mlx_vector_array){arrays}, replayed != 0));
}

static PyMethodDef methods[] = {
    {"mlx_open", mlx_open, METH_NOARGS, "Imports mlx.core. Raises ImportError if it is missing or too old."},
    {"mlx_write", mlx_write, METH_VARARGS, "Writes keys and values of one layer."},
    {"mlx_attend", mlx_attend, METH_VARARGS, "Returns the attention of one layer."},
    {"mlx_fetch", mlx_fetch, METH_VARARGS, "Returns the decoded keys and values of one sequence in one layer."},
    {"mlx_product", mlx_product, METH_VARARGS, "Returns the product of a few rows with a quantized matrix."},
    {"mlx_pending", mlx_pending, METH_VARARGS, "Returns the arrays whose evaluation completes the writes of a step."},
    {"mlx_step_state", mlx_step_state, METH_VARARGS, "Returns the graph key and the input arrays of a step."},
    {"mlx_step_put_state", mlx_step_put_state, METH_VARARGS, "Replaces the input arrays of a step."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "flatkv._native", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
