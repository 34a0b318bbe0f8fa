/* tile.h: products of tiles of 64 by 64 in shared memory. 256 threads compute one: the thread (x,
 * y) of 16 by 16 has rows 4 y .. 4 y + 3, and columns x, x + 16, x + 32, x + 48. Included after
 * device.h. */
#ifndef MOONSHARD_OPS_CUDA_TILE_H
#define MOONSHARD_OPS_CUDA_TILE_H

#include "ops/cuda/device.h"

/* A row of a tile is 4 numbers longer, so that reads along and across rows meet different banks. */
enum { MS_TILE = 64, MS_TILE_ROW = MS_TILE + 4 };

/* Tiles are aligned to it: in shared memory they are arrays of fours, or at the front of the
 * launch's shared memory. */
struct alignas(16) ms_four {
    float of[4];
};
MS_DEVICE_SHARED ms_four ms_read_four(const float *from)
{
    return *reinterpret_cast<const ms_four *>(from);
}

/* sums[i][j] += row 4 y + i of a times row x + 16 j of b, over `depth` columns, rounded up to 4. */
MS_DEVICE_SHARED void ms_multiply_tiles(const float *a, const float *b, int depth, float sums[4][4])
{
    const float *left = a + THREAD_X / 16 * 4 * MS_TILE_ROW,
                *right = b + THREAD_X % 16 * MS_TILE_ROW;
    for (int d = 0; d < depth; d += 4) {
        ms_four l[4], r[4];
        MS_UNROLL for (int i = 0; i < 4; i++) l[i] = ms_read_four(left + i * MS_TILE_ROW + d);
        MS_UNROLL for (int j = 0; j < 4; j++) r[j] = ms_read_four(right + 16 * j * MS_TILE_ROW + d);
        MS_UNROLL for (int k = 0; k < 4; k++) MS_UNROLL for (int i = 0; i < 4; i++)
            MS_UNROLL for (int j = 0; j < 4; j++) sums[i][j] += l[i].of[k] * r[j].of[k];
    }
}

#endif
