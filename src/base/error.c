/* Status names and per-thread error messages. Owns the only thread-local buffer of the library. */
#include "base.h"

#include "printable.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char message[512];

fkv_status fkv_fail(fkv_status status, const char *format, ...) {
    char raw[2 * sizeof message]; /* larger than `message`, so that long text is truncated by fkv_show_into(), at a character
                                     boundary, and not by vsnprintf() */
    va_list args;
    va_start(args, format);
    (void)vsnprintf(raw, sizeof raw, format, args);
    va_end(args);
    fkv_show_into((fkv_bytes){.data = raw, .size = strlen(raw)}, message, sizeof message);
    return status;
}

const char *fkv_message(void) { return message; }

const char *fkv_status_name(fkv_status status) {
    switch (status) {
    case FKV_OK: return "FKV_OK";
    case FKV_BAD_ARGUMENT: return "FKV_BAD_ARGUMENT";
    case FKV_BAD_CONFIG: return "FKV_BAD_CONFIG";
    case FKV_BAD_SEQ: return "FKV_BAD_SEQ";
    case FKV_BAD_STATE: return "FKV_BAD_STATE";
    case FKV_POOL_FULL: return "FKV_POOL_FULL";
    case FKV_SEQ_FULL: return "FKV_SEQ_FULL";
    case FKV_SEQS_FULL: return "FKV_SEQS_FULL";
    case FKV_STEP_FULL: return "FKV_STEP_FULL";
    case FKV_NO_MEMORY: return "FKV_NO_MEMORY";
    case FKV_GONE: return "FKV_GONE";
    case FKV_BUSY: return "FKV_BUSY";
    case FKV_IO: return "FKV_IO";
    case FKV_FILE_FORMAT: return "FKV_FILE_FORMAT";
    case FKV_FILE_VERSION: return "FKV_FILE_VERSION";
    case FKV_FILE_DAMAGED: return "FKV_FILE_DAMAGED";
    case FKV_FILE_FOREIGN: return "FKV_FILE_FOREIGN";
    case FKV_UNSUPPORTED: return "FKV_UNSUPPORTED";
    case FKV_DEVICE: return "FKV_DEVICE";
    }
    return "unknown status";
}

const char *fkv_version(void) { return FKV_VERSION_TEXT; }
