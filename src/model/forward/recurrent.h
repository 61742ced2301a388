/* Recurrent layers on the CPU: gated short convolutions, gated delta nets, Kimi Delta Attention (KDA) and
 * Mamba-2.
 *
 * A recurrent layer replaces attention or runs in parallel with it. It reads the normalized rows in `h` and writes its output,
 * before the output projection, to `mixed`. Its memory of a sequence is a state in the cache (fkv_state_rows()): a step reads the
 * old state and writes the new state to another slot. fkv_architecture_state_bytes() describes the layout of a state.
 *
 * The recurrence runs token by token in a fixed order, and work items never share a state value. Results are therefore
 * bit-identical for any chunking, batch and number of threads.
 */
#ifndef FKV_RECURRENT_H
#define FKV_RECURRENT_H

#include "packed_weights.h"
#include "runner.h"

/* Returns the padded row width of `mixed`, the input of the output projection. */
uint32_t fkv_recurrent_pad(const fkv_hparams *hparams);

/* Reserves the buffers of recurrent layers (carve.h). */
void fkv_recurrent_layout(fkv_carve *carve, fkv_runner *runner);

/* Reserves memory for the inputs that fkv_recurrent_replay() needs. */
void fkv_recurrent_layout_saved(fkv_carve *carve, fkv_runner *runner);

/* Runs a recurrent layer over all rows of the step. index: index of the layer in the model. Saves the inputs of the rows that
 * saved_from selects. */
fkv_status fkv_recurrent_run(fkv_runner *runner, uint32_t index, fkv_step *step);

/* Writes the states of shortened rows again: runs the convolution and the recurrence over the saved inputs of the first tokens of
 * each row. Costs little, because it needs no matrix products. The tables of the runner must describe the shortened rows only
 * (see fkv_runner.shortened). */
fkv_status fkv_recurrent_replay(fkv_runner *runner, uint32_t index, fkv_step *step);

#endif
