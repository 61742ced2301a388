# What `cmake --install` gives: the public headers, the libraries, flatkv.pc and the CMake package. Both descriptions name the
# private dependencies, so that linking the static library works without knowing them. Nothing in the tree names where it was
# built or installed, so it can be moved.
include(CMakePackageConfigHelpers)

set(flatkv_origin $<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>)
# Where a file in this folder of the installed tree finds mlx-c.
function(flatkv_mlx_rpath out folder)
  set(rpath ${flatkv_mlx_folder})
  if(flatkv_mlx_is_in_tree)
    file(RELATIVE_PATH rpath "/${folder}" "/${CMAKE_INSTALL_LIBDIR}/flatkv/mlx/lib")
    string(PREPEND rpath ${flatkv_origin}/)
  endif()
  set(${out} ${rpath} PARENT_SCOPE)
endfunction()

install(FILES include/flatkv/flatkv.h include/flatkv/prefix_store.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/flatkv)
if(FKV_MODELS)
  install(FILES include/flatkv/engine.h include/flatkv/model.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/flatkv)
endif()
install(TARGETS flatkv EXPORT flatkvTargets)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flatkv)
if(flatkv_has_mlx)
  install(FILES include/flatkv/mlx.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/flatkv)
  install(TARGETS flatkv_mlx EXPORT flatkv_mlxTargets)
  install(EXPORT flatkv_mlxTargets NAMESPACE flatkv:: DESTINATION ${package_dir})
  if(flatkv_mlx_is_in_tree) # as scripts/get-mlx laid it out, where its libraries find each other
    install(DIRECTORY ${flatkv_mlx_folder}/../../ DESTINATION ${CMAKE_INSTALL_LIBDIR}/flatkv PATTERN stamp EXCLUDE)
  endif()
  flatkv_mlx_rpath(rpath ${CMAKE_INSTALL_LIBDIR})
  set_target_properties(flatkv_mlx PROPERTIES INSTALL_RPATH "${flatkv_origin};${rpath}")
endif()

install(EXPORT flatkvTargets NAMESPACE flatkv:: DESTINATION ${package_dir})
configure_package_config_file(cmake/flatkvConfig.cmake.in ${PROJECT_BINARY_DIR}/flatkvConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flatkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flatkvConfig.cmake ${PROJECT_BINARY_DIR}/flatkvConfigVersion.cmake DESTINATION ${package_dir})

# In a shared library the dependencies are its own affair. Whoever links a static one needs them, with or without --static.
if(BUILD_SHARED_LIBS)
  set(pc_requires "")
  set(pc_libs "")
else()
  set(pc_requires ${flatkv_requires})
  set(pc_libs "-pthread -lm")
endif()
# Where the installed file says the tree is: from its own place, so that an installed tree can be moved.
file(RELATIVE_PATH pc_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
configure_file(cmake/flatkv.pc.in ${PROJECT_BINARY_DIR}/flatkv.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flatkv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
