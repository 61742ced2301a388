/* Serializes the steps of engines that share CPU cores. An engine runs a step only during its turn, so the worker threads of two
 * engines never compete for a core. Turns are granted in the order in which they are requested, so a busy engine cannot starve
 * another.
 */
#ifndef FKV_ENGINE_STEP_TURNS_H
#define FKV_ENGINE_STEP_TURNS_H

#include "../base/base.h"

typedef struct fkv_step_turns fkv_step_turns;

/* Creates a turn lock with one member engine. Returns NULL if out of memory. */
fkv_step_turns *fkv_step_turns_open(void);

/* Add or remove a member engine. The turn lock is freed when its last member leaves. `turns` may be NULL in
 * fkv_step_turns_leave(). */
void fkv_step_turns_join(fkv_step_turns *turns);
void fkv_step_turns_leave(fkv_step_turns *turns);

/* fkv_step_turns_begin() waits for the caller's turn, and fkv_step_turns_end() ends the turn. */
void fkv_step_turns_begin(fkv_step_turns *turns);
void fkv_step_turns_end(fkv_step_turns *turns);

#endif
