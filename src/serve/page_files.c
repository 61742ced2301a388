/* See page_files.h. CMakeLists.txt generates page_bytes.h, which defines the array FILES. */
#include "page_files.h"

#include <page_bytes.h>
#include <string.h>

const char PAGE_SECURITY_POLICY[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "require-trusted-types-for 'script'; trusted-types dompurify; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

const page_file *page_file_find(const char *path) {
    for (size_t i = 0; i < sizeof FILES / sizeof FILES[0]; i++)
        if (strcmp(FILES[i].path, path) == 0) return &FILES[i];
    return NULL;
}
