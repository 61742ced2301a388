# Adds the grammar support of flatkv serve: llguidance, installed on the system or built by scripts/get-llguidance, or a stub without it.
if(NOT FKV_LLGUIDANCE)
  target_sources(flatkv_serve PRIVATE grammar_none.c)
  return()
endif()

set(llguidance_in_tree ${PROJECT_SOURCE_DIR}/build/llguidance)
find_path(FKV_LLGUIDANCE_INCLUDE_DIR llguidance.h PATHS ${llguidance_in_tree} DOC "Folder that contains llguidance.h")
find_library(FKV_LLGUIDANCE_LIBRARY libllguidance.a PATHS ${llguidance_in_tree} DOC "Static library of llguidance")
mark_as_advanced(FKV_LLGUIDANCE_INCLUDE_DIR FKV_LLGUIDANCE_LIBRARY)
if(NOT FKV_LLGUIDANCE_INCLUDE_DIR OR NOT FKV_LLGUIDANCE_LIBRARY)
  message(FATAL_ERROR "FKV_LLGUIDANCE is ON, but llguidance was not found: run scripts/get-llguidance")
endif()
message(STATUS "Building grammar support with ${FKV_LLGUIDANCE_LIBRARY}")
add_library(flatkv_llguidance STATIC IMPORTED)
set_target_properties(flatkv_llguidance PROPERTIES
  IMPORTED_LOCATION ${FKV_LLGUIDANCE_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${FKV_LLGUIDANCE_INCLUDE_DIR})
target_sources(flatkv_serve PRIVATE grammar_llguidance.c)
target_link_libraries(flatkv_serve PRIVATE flatkv_llguidance ${CMAKE_DL_LIBS})
