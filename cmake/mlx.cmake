# Finds mlx-c: the system's (Homebrew's on macOS), or the copy that scripts/get-mlx put into the build tree. Sets flatkv_has_mlx and
# creates the target flatkv_mlxc. Stops with an error if FKV_MLX is ON and mlx-c is not found.
set(flatkv_has_mlx OFF)
if(FKV_MLX STREQUAL "OFF" OR FKV_PARITY_ONLY)
  return()
endif()

set(mlx_in_tree ${PROJECT_SOURCE_DIR}/build/mlx)
find_path(FKV_MLX_INCLUDE_DIR mlx/c/mlx.h PATHS ${mlx_in_tree}/cpu/mlx/include DOC "Folder with mlx/c/mlx.h")
find_library(FKV_MLX_LIBRARY mlxc PATHS ${mlx_in_tree}/cpu/mlx/lib DOC "mlx-c, as a shared library")
mark_as_advanced(FKV_MLX_INCLUDE_DIR FKV_MLX_LIBRARY)
if(NOT FKV_MLX_INCLUDE_DIR OR NOT FKV_MLX_LIBRARY)
  if(FKV_MLX STREQUAL "ON")
    message(FATAL_ERROR "FKV_MLX is ON, but mlx-c was not found: run scripts/get-mlx (Linux) or brew install mlx-c (macOS)")
  endif()
  message(STATUS "mlx-c was not found; building without the MLX backend")
  return()
endif()
message(STATUS "Building the MLX backend with ${FKV_MLX_LIBRARY}")
set(flatkv_has_mlx ON)
cmake_path(GET FKV_MLX_LIBRARY PARENT_PATH flatkv_mlx_folder)
# A copy in the build tree is installed with flatkv, because an installed file must not refer to the build tree.
cmake_path(IS_PREFIX mlx_in_tree "${FKV_MLX_LIBRARY}" NORMALIZE flatkv_mlx_is_in_tree)

add_library(flatkv_mlxc UNKNOWN IMPORTED)
set_target_properties(flatkv_mlxc PROPERTIES
  IMPORTED_LOCATION ${FKV_MLX_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${FKV_MLX_INCLUDE_DIR})
