/* Interface between module.c and the implementation of mlx-c over the mlx.core module of the Python process. */
#ifndef FKV_PYTHON_MLX_CALLS_H
#define FKV_PYTHON_MLX_CALLS_H

#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <mlx/c/mlx.h>

/* Imports mlx.core and looks up the required functions and types once. Returns -1 with a Python exception if one is missing. */
int fkv_python_mlx_open(void);

/* Returns a handle that owns a new reference to array. Returns an empty handle with a Python exception if out of memory. */
mlx_array fkv_python_mlx_wrap(PyObject *array);

/* Returns a borrowed reference to the array of a handle, or NULL if the handle is empty. */
PyObject *fkv_python_mlx_object(mlx_array a);

#endif
