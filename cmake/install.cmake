# What `cmake --install` gives: the public headers, the library, flatkv.pc and the CMake package. Both descriptions name the
# private dependencies, so that linking the static library works without knowing them.
include(CMakePackageConfigHelpers)

install(DIRECTORY include/flatkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS flatkv EXPORT flatkvTargets)
if(flatkv_has_mlx AND NOT flatkv_mlx_is_in_tree)
  install(TARGETS flatkv_mlx EXPORT flatkvTargets)
elseif(flatkv_has_mlx AND BUILD_SHARED_LIBS AND FKV_PROGRAMS)
  install(TARGETS flatkv_mlx LIBRARY NAMELINK_SKIP) # for the program alone
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flatkv)
install(EXPORT flatkvTargets NAMESPACE flatkv:: DESTINATION ${package_dir})
configure_package_config_file(cmake/flatkvConfig.cmake.in ${PROJECT_BINARY_DIR}/flatkvConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flatkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flatkvConfig.cmake ${PROJECT_BINARY_DIR}/flatkvConfigVersion.cmake DESTINATION ${package_dir})

# In a shared library the dependencies are private; a static one passes them on.
if(BUILD_SHARED_LIBS)
  set(pc_requires_private "")
  set(pc_libs_private "")
else()
  set(pc_requires_private ${flatkv_requires})
  set(pc_libs_private "-pthread -lm")
endif()
# Where the installed file says the tree is: from its own place, so that an installed tree can be moved.
file(RELATIVE_PATH pc_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
configure_file(cmake/flatkv.pc.in ${PROJECT_BINARY_DIR}/flatkv.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flatkv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
