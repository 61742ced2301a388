/* The requests that wait, in the order of their arrival, and who of them goes next.
 *
 * The tenant that was served least goes first; within a tenant the higher priority (raised by one for every ageing_s of waiting),
 * then the earlier deadline, then the longer cached prefix, then who asked first.
 */
#ifndef FKV_WAITING_LINE_H
#define FKV_WAITING_LINE_H

#include "fair_share.h"
#include "request.h"

typedef struct fkv_waiting_line {
    fkv_job *first;
    fkv_job *last;
    uint32_t n;
} fkv_waiting_line;

void fkv_waiting_line_add(fkv_waiting_line *line, fkv_job *job);
void fkv_waiting_line_remove(fkv_waiting_line *line, fkv_job *job);

/* Of those not passed over in this turn; NULL: none. */
fkv_job *fkv_waiting_line_next(const fkv_waiting_line *line, const fkv_fair_share *share, double now, double ageing_s,
                               uint64_t turn);

#endif
