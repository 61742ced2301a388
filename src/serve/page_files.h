/* Files of the web page (src/serve/page), which are compiled into the program. */
#ifndef FKV_SERVE_PAGE_FILES_H
#define FKV_SERVE_PAGE_FILES_H

#include <stddef.h>

typedef struct page_file {
    const char *path; /* path of the request: "/" for index.html, otherwise "/page/NAME" */
    const char *type; /* value of the Content-Type header */
    const char *etag; /* ETag: prefix of the SHA-256 of the file, in quotes */
    const unsigned char *bytes;
    size_t n_bytes;
} page_file;

/* Returns the file with this path, or NULL if there is none. */
const page_file *page_file_find(const char *path);

/* Content-Security-Policy of the page. Scripts and styles may come only from this server, inline code is not executed, and HTML
 * strings may be parsed only by DOMPurify, so that model output cannot run code even if a sanitizer rule is wrong. */
extern const char PAGE_SECURITY_POLICY[];

#endif
