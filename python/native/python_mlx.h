/* mlx-c's calls over Python's own mlx.core: what module.c needs of it. */
#ifndef FKV_PYTHON_MLX_CALLS_H
#define FKV_PYTHON_MLX_CALLS_H

#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <mlx/c/mlx.h>

/* Imports mlx.core and finds what is needed of it, once. -1 with a Python exception where MLX is missing or has not all of it. */
int fkv_python_mlx_open(void);

/* A handle that holds a reference of its own. Empty, with a Python exception, where memory ends. */
mlx_array fkv_python_mlx_take(PyObject *array);

/* What a handle holds, borrowed; NULL for an empty one. */
PyObject *fkv_python_mlx_object(mlx_array a);

#endif
