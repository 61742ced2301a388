# Embeds the kernel files of src/attn/gpu as strings: kernel_files.h and kernel_files.c, made anew where a file changed.
# usage: cmake "-DFILES=<paths>" -DOUT=<folder> -P kernel_files.cmake
set(header "/* Made by cmake/kernel_files.cmake from the files of src/attn/gpu. */\n")
set(source "${header}#include \"kernel_files.h\"\n")
foreach(path IN LISTS FILES)
  cmake_path(GET path STEM name)
  file(READ ${path} bytes HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
  string(APPEND header "extern const char fkv_kernel_file_${name}[];\n")
  string(APPEND source "const char fkv_kernel_file_${name}[] = {${bytes}0};\n")
endforeach()
file(WRITE ${OUT}/kernel_files.h "${header}")
file(WRITE ${OUT}/kernel_files.c "${source}")
