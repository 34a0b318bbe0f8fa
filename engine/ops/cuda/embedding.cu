/* embedding.cu: rows of a table by their numbers, and the sums of the gradients of one number. */
#include "ops/cuda/embedding.h"

#include "ops/cuda/device.h"

/* --------------------------------------------------------------------- forward */

template <class Piece> MS_DEVICE void copy_row(void *to, const void *from, int64_t pieces)
{
    for (int64_t i = THREAD_X; i < pieces; i += THREADS_X)
        static_cast<Piece *>(to)[i] = static_cast<const Piece *>(from)[i];
}

/* Bits are copied unchanged. */
MS_KERNEL_FREE(embedding_rows, ms_cuda_embedding_call, MS_CUDA_ROW_THREADS)
{
    const ms_embedding_args &e = args.e;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= e.count) return;
    int64_t id = ms_read_whole(e.ids, at, e.ids_dtype), bytes = args.pieces * args.piece;
    if (id < 0 || id >= e.rows) {
        if (THREAD_X == 0) ms_note_fault(args.fault, at, id, e.rows, 0);
        return;
    }
    void *to = static_cast<char *>(e.values) + at * bytes;
    const void *from = static_cast<const char *>(e.table) + id * bytes;
    if (args.piece == 16) copy_row<ms_chunk>(to, from, args.pieces);
    else if (args.piece == 4) copy_row<uint32_t>(to, from, args.pieces);
    else copy_row<uint16_t>(to, from, args.pieces);
}

/* --------------------------------------------------------------------- sorting */

MS_KERNEL_FREE(embedding_keys, ms_cuda_sort_call, 256)
{
    uint32_t *keys = const_cast<uint32_t *>(args.keys),
             *positions = const_cast<uint32_t *>(args.positions);
    for (int64_t i = GRID_FIRST; i < args.count; i += GRID_STEP) {
        int64_t id = ms_read_whole(args.ids, i, args.ids_dtype);
        keys[i] = (uint32_t)(id >= 0 && id < args.rows ? id : args.rows);
        positions[i] = (uint32_t)i;
    }
}

/* Counts of the 16 digits, four in a word. A tile has fewer than 2^16 positions. */
struct digit_counts {
    uint64_t of[4];
};
MS_DEVICE void count_digit(digit_counts &counts, uint32_t digit)
{
    for (uint32_t word = 0; word < 4; word++)
        counts.of[word] += digit / 4 == word ? (uint64_t)1 << digit % 4 * 16 : 0;
}
MS_DEVICE uint32_t count_of(const digit_counts &counts, uint32_t digit)
{
    uint64_t of = digit < 8 ? (digit < 4 ? counts.of[0] : counts.of[1])
                            : (digit < 12 ? counts.of[2] : counts.of[3]);
    return (uint32_t)(of >> digit % 4 * 16) & 0xffffu;
}

/* A thread has eight positions in a row, the next thread the eight after them. */
MS_DEVICE int64_t first_position(void) { return BLOCK_X * MS_CUDA_SORT_TILE + THREAD_X * 8; }
MS_DEVICE digit_counts count_own(const ms_cuda_sort_call &args)
{
    digit_counts counts = { { 0, 0, 0, 0 } };
    for (int64_t i = first_position(), end = i + 8; i < end && i < args.count; i++)
        count_digit(counts, args.keys[i] >> args.shift & 15);
    return counts;
}

MS_KERNEL(sort_count, ms_cuda_sort_call, 256)
{
    MS_SHARED(uint64_t, shared, MS_WARP);
    digit_counts counts = count_own(args);
    for (int word = 0; word < 4; word++)
        counts.of[word] = ms_block_join(counts.of[word], shared, ms_plus());
    if (THREAD_X < 16)
        args.digits[THREAD_X * args.tiles + BLOCK_X] = count_of(counts, (uint32_t)THREAD_X);
}

/* The sum of the values of all threads before this one. `shared` has 32 places. */
MS_DEVICE uint64_t sum_before(uint64_t value, uint64_t *shared)
{
    uint64_t sum = value, before = 0;
    for (int distance = 1; distance < MS_WARP; distance *= 2) {
        uint64_t other = ms_warp_from(sum, LANE < distance ? LANE : LANE - distance);
        if (LANE >= distance) sum += other;
    }
    if (LANE == MS_WARP - 1) shared[WARP] = sum;
    ms_barrier();
    for (int warp = 0; warp < WARP; warp++) before += shared[warp];
    ms_barrier();
    return before + sum - value;
}

/* One block. What was a count becomes the sum of all counts before it: first all tiles of digit 0,
 * then those of digit 1, and so on. */
MS_KERNEL(sort_scan, ms_cuda_sort_call, MS_CUDA_ROW_THREADS)
{
    MS_SHARED(uint64_t, shared, MS_WARP);
    int64_t numbers = 16 * args.tiles, each = (numbers + THREADS_X - 1) / THREADS_X,
            begin = THREAD_X * each, end = begin + each < numbers ? begin + each : numbers;
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; i++) sum += args.digits[i];
    sum = sum_before(sum, shared);
    for (int64_t i = begin; i < end; i++) {
        uint32_t here = args.digits[i];
        args.digits[i] = (uint32_t)sum;
        sum += here;
    }
}

MS_KERNEL(sort_move, ms_cuda_sort_call, 256)
{
    MS_SHARED(uint64_t, shared, MS_WARP);
    digit_counts counts = count_own(args);
    for (int word = 0; word < 4; word++) counts.of[word] = sum_before(counts.of[word], shared);
    for (int64_t i = first_position(), end = i + 8; i < end && i < args.count; i++) {
        uint32_t key = args.keys[i], digit = key >> args.shift & 15;
        int64_t to = (int64_t)args.digits[digit * args.tiles + BLOCK_X] + count_of(counts, digit);
        args.sorted_keys[to] = key;
        args.sorted_positions[to] = args.positions[i];
        count_digit(counts, digit);
    }
}

/* ------------------------------------------------------------------------ sums */

/* Where the positions of each row begin and end, and which rows have many. */
MS_KERNEL_FREE(embedding_bounds, ms_cuda_embedding_sum_call, 256)
{
    for (int64_t i = GRID_FIRST; i < args.e.count; i += GRID_STEP) {
        uint32_t key = args.keys[i];
        if (key >= args.e.rows) continue;
        if (i + 1 == args.e.count || args.keys[i + 1] != key) args.end[key] = (uint32_t)(i + 1);
        if (i > 0 && args.keys[i - 1] == key) continue;
        args.begin[key] = (uint32_t)i;
        if (i + MS_CUDA_OFTEN < args.e.count && args.keys[i + MS_CUDA_OFTEN] == key)
            args.often_rows[ms_atomic_add(args.often, (uint32_t)1)] = key;
    }
}

/* A row of the table: the sum of its gradients in order of position, in f32. */
MS_KERNEL_FREE(embedding_sum, ms_cuda_embedding_sum_call, MS_CUDA_ROW_THREADS)
{
    const ms_embedding_args &e = args.e;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= e.rows) return;
    uint32_t begin = args.begin[at], end = args.end[at];
    if (end - begin > MS_CUDA_OFTEN || (e.accumulate && end == begin)) return;
    ms_row row = ms_row_of(at, e.width, args.aligned);
    ms_walk(row, [&](auto size, int64_t i) {
        float sum[size.N], v[size.N];
        ms_get_or(size, e.accumulate ? e.table : NULL, row.begin + i, MS_F32, 0.0f, sum);
        for (const uint32_t *p = args.positions + begin; p < args.positions + end; p++) {
            ms_get(size, e.values, *p * e.width + i, e.dtype, v);
            for (int k = 0; k < size.N; k++) sum[k] += v[k];
        }
        ms_put(size, e.table, row.begin + i, e.dtype, sum);
    });
}

/* One column of a row that has many positions: warp w adds those whose rank is w modulo the number
 * of warps. Returns the sum of the warps, in their order, to warp 0. */
MS_DEVICE double sum_often(const ms_cuda_embedding_sum_call &args, int64_t row, int64_t column,
                           double *shared)
{
    const ms_embedding_args &e = args.e;
    uint32_t end = args.end[row];
    float sum = 0;
    for (uint32_t p = args.begin[row] + (uint32_t)THREAD_Y; p < end && column < e.width;
         p += MS_CUDA_OFTEN_WARPS)
        sum += ms_get_one(e.values, args.positions[p] * e.width + column, e.dtype);
    shared[THREAD_Y * MS_WARP + THREAD_X] = (double)sum;
    ms_barrier();
    double total = 0;
    for (int y = 0; y < MS_CUDA_OFTEN_WARPS; y++) total += shared[y * MS_WARP + THREAD_X];
    ms_barrier();
    return total;
}

MS_KERNEL(embedding_sum_often, ms_cuda_embedding_sum_call, MS_WARP *MS_CUDA_OFTEN_WARPS)
{
    MS_SHARED(double, shared, MS_WARP *MS_CUDA_OFTEN_WARPS);
    const ms_embedding_args &e = args.e;
    for (int64_t k = BLOCK_X; k < *args.often; k += BLOCKS_X)
        for (int64_t first = BLOCK_Y * MS_WARP; first < e.width; first += BLOCKS_Y * MS_WARP) {
            int64_t row = args.often_rows[k], column = first + THREAD_X;
            double sum = sum_often(args, row, column, shared);
            if (THREAD_Y != 0 || column >= e.width) continue;
            int64_t i = row * e.width + column;
            if (e.accumulate) sum += (double)ms_get_one(e.table, i, e.dtype);
            float rounded = (float)sum;
            ms_put(ms_size<1>(), e.table, i, e.dtype, &rounded);
        }
}
