/* Decode: few queries of each sequence over its packed pages, one piece of the history of one KV head a block. Devices with
 * matrix units take decode_mma.h where the head has a multiple of 64 channels; everything else the plain loops of decode_plain.h.
 * Both leave the same parts for attend_merge.h.
 */
