/* Turns of engines that share cores. An engine runs a step only during its turn, so that the worker threads of two engines never
 * compete for a core. Turns are granted in the order in which the engines ask for them, so a busy engine cannot starve another.
 */
#ifndef FKV_ENGINE_STEP_TURNS_H
#define FKV_ENGINE_STEP_TURNS_H

#include "../base/base.h"

typedef struct fkv_step_turns fkv_step_turns;

/* Creates turns with one member. Returns NULL if out of memory. */
fkv_step_turns *fkv_step_turns_open(void);

/* Adds or removes a member. The last member that leaves frees the turns. `turns` may be NULL in fkv_step_turns_leave(). */
void fkv_step_turns_join(fkv_step_turns *turns);
void fkv_step_turns_leave(fkv_step_turns *turns);

/* Waits for the caller's turn, and ends it. */
void fkv_step_turns_begin(fkv_step_turns *turns);
void fkv_step_turns_end(fkv_step_turns *turns);

#endif
