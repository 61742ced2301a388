# Debian packages, one per install component. scripts/make-packages builds them.
#
#   libflatkv      shared libraries
#   libflatkv-dev  headers, pkg-config files and the CMake package
#   flatkv         the program, its man page, its completions and the needle model
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "flatkv authors <flatkv@localhost>")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL libraries development program)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON) # derives package dependencies from the linked libraries
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR}) # dpkg-shlibdeps finds libflatkv here
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_DEBIAN_LIBRARIES_PACKAGE_NAME libflatkv)
set(CPACK_DEBIAN_LIBRARIES_PACKAGE_SECTION libs)
set(CPACK_COMPONENT_LIBRARIES_DESCRIPTION "KV cache with a fixed memory plan, shared libraries")

set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libflatkv-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libflatkv (= ${PROJECT_VERSION})")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "KV cache with a fixed memory plan, development files")

set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME flatkv)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_DEPENDS "libflatkv (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_PROGRAM_PACKAGE_RECOMMENDS ca-certificates) # flatkv pull verifies TLS certificates
set(CPACK_COMPONENT_PROGRAM_DESCRIPTION "Runs and serves language models with a KV cache of fixed memory")

foreach(component IN LISTS CPACK_COMPONENTS_ALL)
  string(TOUPPER ${component} name)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${CPACK_DEBIAN_${name}_PACKAGE_NAME} RENAME copyright
    COMPONENT ${component})
endforeach()
include(CPack)
