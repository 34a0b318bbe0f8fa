/* io_data.c: data sets of every format, and loaders: order, shuffling, ranks, resuming, failing
 * allocations. */
#include "io_support.h"

#include <zlib.h>

static ms_context context;

/* ---------------------------------------------------------------- data sets */

/* `count` tokens 0, 1, 2 ... as a nanoGPT file: a token's value is its position. */
static ms_dataset *counting_tokens(uint32_t count)
{
    uint16_t *tokens = malloc(count * sizeof *tokens);
    const char *path = in_folder("tokens.bin");
    ms_dataset *dataset = NULL;
    for (uint32_t i = 0; i < count; i++) tokens[i] = (uint16_t)i;
    put_file(path, tokens, count * sizeof *tokens);
    free(tokens);
    assert_int_equal(ms_dataset_tokens(&context, &path, 1, &dataset), MS_OK);
    assert_int_equal(ms_dataset_size(dataset), count);
    return dataset;
}

static ms_loader *loader_of(ms_dataset *dataset, ms_loader_options options)
{
    ms_loader *loader = NULL;
    assert_int_equal(ms_loader_new(&context, dataset, &options, &loader), MS_OK);
    return loader;
}

static ms_batch next(ms_loader *loader)
{
    ms_batch batch;
    assert_int_equal(ms_loader_next(&context, loader, &batch), MS_OK);
    return batch;
}

static int64_t token(const ms_batch *batch, uint32_t length, uint32_t row, uint32_t column)
{
    return ((const int64_t *)batch->x)[row * length + column];
}

static void test_bytes_of_files_and_folders(void **state)
{
    (void)state;
    ms_dataset *dataset = NULL;
    assert_int_equal(ms_folder_make(&context, in_folder("d/b")), MS_OK);
    put_file(in_folder("d/c"), "C", 1);
    put_file(in_folder("d/a"), "A\0\xff", 3);
    put_file(in_folder("d/.hidden"), "H", 1);
    put_file(in_folder("d/b/x"), "X", 1);
    put_file(in_folder("last"), "L!", 2);
    const char *paths[] = { in_folder("d"), in_folder("last") };
    assert_int_equal(ms_dataset_bytes(&context, paths, 2, &dataset), MS_OK);
    assert_int_equal(ms_dataset_size(dataset), 7);
    ms_loader *loader = loader_of(dataset, (ms_loader_options){ .batch = 1, .length = 6 });
    ms_batch batch = next(loader);
    const int64_t expected[] = { 'A', 0, 255, 'X', 'C', 'L', '!' };
    assert_memory_equal(batch.x, expected, sizeof(int64_t) * 6);
    assert_memory_equal(batch.y, expected + 1, sizeof(int64_t) * 6);
    ms_loader_free(loader);
    ms_dataset_release(dataset);
    paths[1] = in_folder("none");
    dataset = NULL;
    assert_int_equal(ms_dataset_bytes(&context, paths, 2, &dataset), MS_ERROR_NOT_FOUND);
    assert_int_equal(ms_folder_make(&context, in_folder("empty")), MS_OK);
    paths[0] = in_folder("empty");
    assert_int_equal(ms_dataset_bytes(&context, paths, 1, &dataset), MS_ERROR_NOT_FOUND);
    assert_non_null(strstr(context.error.message, "not one byte of data"));
    assert_int_equal(symlink(in_folder("empty"), in_folder("empty/loop")), 0);
    assert_int_equal(ms_dataset_bytes(&context, paths, 1, &dataset), MS_ERROR_IO);
    assert_null(dataset);
}

/* A shard of llm.c: 256 numbers of which three say something, then tokens. */
static void put_shard(const char *path, uint32_t magic, uint32_t version, uint32_t count,
                      const void *tokens, size_t bytes)
{
    uint32_t header[256] = { magic, version, count };
    char *file = malloc(sizeof header + bytes);
    memcpy(file, header, sizeof header);
    memcpy(file + sizeof header, tokens, bytes);
    put_file(path, file, sizeof header + bytes);
    free(file);
}

static void check_tokens(const char *const *paths, uint32_t count, const int64_t *expected,
                         uint32_t tokens)
{
    ms_dataset *dataset = NULL;
    assert_int_equal(ms_dataset_tokens(&context, paths, count, &dataset), MS_OK);
    assert_int_equal(ms_dataset_size(dataset), tokens);
    ms_loader *loader = loader_of(dataset, (ms_loader_options){ .batch = 1, .length = tokens - 1 });
    ms_batch batch = next(loader);
    assert_memory_equal(batch.x, expected, (tokens - 1) * sizeof *expected);
    assert_memory_equal(batch.y, expected + 1, (tokens - 1) * sizeof *expected);
    ms_loader_free(loader);
    ms_dataset_release(dataset);
}

static void test_token_shards_of_every_kind(void **state)
{
    (void)state;
    const uint16_t narrow[] = { 50256, 1, 65535, 300 };
    const uint32_t wide[] = { 128000, 1, 0xfffffffe };
    const char *paths[] = { in_folder("a"), in_folder("b") };
    put_shard(paths[0], 20240520, 1, 4, narrow, 8);
    put_file(paths[1], narrow, 4);
    check_tokens(paths, 1, (const int64_t[]){ 50256, 1, 65535, 300 }, 4);
    check_tokens(paths, 2, (const int64_t[]){ 50256, 1, 65535, 300, 50256, 1 }, 6);
    /* Only what has no header is counted. */
    ms_dataset *both = NULL;
    assert_int_equal(ms_dataset_tokens(&context, paths, 2, &both), MS_OK);
    ms_bare_shards bare = ms_dataset_bare(both);
    assert_true(bare.files == 1 && bare.tokens == 2 && bare.largest == 50256);
    ms_dataset_release(both);
    put_shard(paths[1], 20240801, 7, 3, wide, 12);
    check_tokens(paths + 1, 1, (const int64_t[]){ 128000, 1, 0xfffffffe }, 3);
    ms_dataset *dataset = NULL;
    assert_int_equal(ms_dataset_tokens(&context, paths, 2, &dataset), MS_ERROR_MISMATCH);
    assert_non_null(strstr(context.error.message, "/b' has tokens of 4 bytes"));
}

static void test_bad_shards_are_named_with_the_byte(void **state)
{
    (void)state;
    const uint16_t tokens[] = { 1, 2, 3, 4 };
    const char *path = in_folder("bad");
    ms_dataset *dataset = NULL;
    put_shard(path, 20240520, 2, 4, tokens, 8);
    assert_int_equal(ms_dataset_tokens(&context, &path, 1, &dataset), MS_ERROR_CORRUPT);
    assert_non_null(strstr(context.error.message, "/bad', byte 4: a token shard of version 2"));
    put_shard(path, 20240520, 1, 5, tokens, 8);
    assert_int_equal(ms_dataset_tokens(&context, &path, 1, &dataset), MS_ERROR_CORRUPT);
    assert_non_null(strstr(context.error.message, "/bad', byte 8: a token shard of 5 tokens"));
    put_file(path, tokens, 7);
    assert_int_equal(ms_dataset_tokens(&context, &path, 1, &dataset), MS_ERROR_CORRUPT);
    assert_non_null(strstr(context.error.message, "/bad', byte 6"));
    put_file(path, tokens, 0);
    assert_int_equal(ms_dataset_tokens(&context, &path, 1, &dataset), MS_ERROR_NOT_FOUND);
    assert_null(dataset);
}

/* Three images of 2 x 2 and their labels, as idx. */
static const unsigned char idx_images[] = { 0, 0, 8, 3,  0,   0,   0, 3, 0, 0, 0, 2, 0, 0,
                                            0, 2, 0, 51, 255, 102, 1, 2, 3, 4, 9, 9, 9, 9 };
static const unsigned char idx_labels[] = { 0, 0, 8, 1, 0, 0, 0, 3, 7, 0, 9 };

static void put_packed(const char *path, const void *data, size_t bytes)
{
    gzFile file = gzopen(path, "wb");
    assert_int_equal(gzwrite(file, data, (unsigned)bytes), (int)bytes);
    assert_int_equal(gzclose(file), Z_OK);
}

static void test_images_plain_and_packed(void **state)
{
    (void)state;
    const float expected[] = { 0, 51 / 255.0f, 1, 102 / 255.0f };
    put_file(in_folder("labels"), idx_labels, sizeof idx_labels);
    for (int packed = 0; packed < 2; packed++) {
        ms_dataset *dataset = NULL;
        ms_dtype dtype;
        int64_t shape[3];
        if (packed) put_packed(in_folder("images"), idx_images, sizeof idx_images);
        else put_file(in_folder("images"), idx_images, sizeof idx_images);
        assert_int_equal(
            ms_dataset_images(&context, in_folder("images"), in_folder("labels"), &dataset), MS_OK);
        assert_int_equal(ms_dataset_size(dataset), 3);
        assert_false(ms_dataset_has_tokens(dataset));
        ms_loader *loader = loader_of(dataset, (ms_loader_options){ .batch = 3 });
        assert_int_equal(ms_loader_shape(loader, 3, &dtype, shape), 3);
        assert_true(dtype == MS_F32 && shape[0] == 3 && shape[1] == 2 && shape[2] == 2);
        ms_batch batch = next(loader);
        assert_int_equal(batch.x_bytes, 48);
        assert_memory_equal(batch.x, expected, sizeof expected);
        assert_memory_equal(batch.y, ((const int64_t[]){ 7, 0, 9 }), 24);
        ms_loader_free(loader);
        ms_dataset_release(dataset);
    }
}

static void check_bad_images(const char *why)
{
    ms_dataset *dataset = NULL;
    ms_status status =
        ms_dataset_images(&context, in_folder("images"), in_folder("labels"), &dataset);
    if ((status != MS_ERROR_CORRUPT && status != MS_ERROR_MISMATCH)
        || !strstr(context.error.message, why))
        fail_msg("%s instead of %s", context.error.message, why);
    assert_null(dataset);
}

static void test_bad_images_are_refused(void **state)
{
    (void)state;
    unsigned char copy[sizeof idx_images + 1] = { 0 };
    put_file(in_folder("labels"), idx_labels, sizeof idx_labels);
    put_file(in_folder("images"), idx_images, sizeof idx_images - 1);
    check_bad_images("sizes do not fit its 27 bytes");
    put_file(in_folder("images"), idx_images, 9);
    check_bad_images("not an idx file");
    memcpy(copy, idx_images, sizeof idx_images);
    memset(copy + 4, 0xff, 12);
    put_file(in_folder("images"), copy, sizeof idx_images);
    check_bad_images("sizes do not fit");
    put_file(in_folder("images"), idx_labels, sizeof idx_labels);
    check_bad_images("not an idx file of bytes with 3 dimensions");
    put_file(in_folder("images"), idx_images, sizeof idx_images);
    put_file(in_folder("labels"), (const unsigned char[]){ 0, 0, 8, 1, 0, 0, 0, 1, 7 }, 9);
    check_bad_images("has 3 images");
    /* gzip that is cut, continued, or flipped in any bit of its data or checksum */
    void *packed = NULL;
    size_t bytes = 0;
    int taken = 0;
    put_file(in_folder("labels"), idx_labels, sizeof idx_labels);
    put_packed(in_folder("packed"), idx_images, sizeof idx_images);
    assert_int_equal(ms_file_read_all(&context, in_folder("packed"), 10000, &packed, &bytes),
                     MS_OK);
    for (size_t length = 2; length < bytes; length++) {
        put_file(in_folder("images"), packed, length);
        check_bad_images("/images'");
    }
    put_file(in_folder("images"), packed, bytes + 1); /* the zero byte after the content */
    check_bad_images("something follows the gzip data");
    for (size_t bit = 10 * 8; bit < bytes * 8; bit++) {
        ((char *)packed)[bit / 8] ^= (char)(1 << bit % 8);
        put_file(in_folder("images"), packed, bytes);
        ((char *)packed)[bit / 8] ^= (char)(1 << bit % 8);
        ms_dataset *dataset = NULL;
        ms_status status =
            ms_dataset_images(&context, in_folder("images"), in_folder("labels"), &dataset);
        taken += status == MS_OK;
        assert_true(status == MS_OK || status == MS_ERROR_CORRUPT);
        ms_dataset_release(dataset);
    }
    assert_true(taken < 8); /* only the bits that fill the last byte mean nothing */
    ms_release(&context, packed);
}

static void test_split_shares_and_divides(void **state)
{
    (void)state;
    ms_dataset *whole = counting_tokens(103), *first = NULL, *rest = NULL;
    assert_int_equal(ms_dataset_split(&context, whole, 1.1, &first, &rest), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_dataset_split(&context, whole, 0.9, &first, &rest), MS_OK);
    ms_dataset_release(whole);
    assert_int_equal(ms_dataset_size(first), 92);
    assert_int_equal(ms_dataset_size(rest), 11);
    ms_loader *loader = loader_of(rest, (ms_loader_options){ .batch = 1, .length = 10 });
    ms_dataset_release(first);
    ms_dataset_release(rest);
    ms_batch batch = next(loader);
    for (uint32_t i = 0; i < 10; i++) assert_int_equal(token(&batch, 10, 0, i), 92 + i);
    ms_loader_free(loader);
}

/* ------------------------------------------------------------------ loaders */

static void test_windows_in_order_end_and_begin_again(void **state)
{
    (void)state;
    /* 10 windows of 5, one token for the last y, one left over */
    ms_dataset *dataset = counting_tokens(52);
    ms_loader *loader = loader_of(dataset, (ms_loader_options){ .batch = 4, .length = 5 });
    for (int i = 0; i < 10; i++) {
        ms_batch batch = next(loader);
        for (uint32_t row = 0; row < 4; row++)
            for (uint32_t column = 0; column < 5; column++) {
                assert_int_equal(token(&batch, 5, row, column),
                                 (4 * i + (int)row) % 10 * 5 + (int)column);
                assert_int_equal(((const int64_t *)batch.y)[row * 5 + column],
                                 token(&batch, 5, row, column) + 1);
            }
        ms_loader_state now = ms_loader_get_state(loader);
        assert_int_equal(now.epoch, 4 * (i + 1) / 10);
        assert_int_equal(now.position, 4 * (i + 1) % 10);
    }
    ms_loader_free(loader);
    ms_dataset_release(dataset);
}

static void test_an_epoch_gives_each_window_once_from_a_new_beginning(void **state)
{
    (void)state;
    static const uint32_t sizes[] = { 5, 6, 11, 80, 81, 85, 86, 400, 1283, 20000 };
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        ms_dataset *dataset = counting_tokens(sizes[s] + 1);
        ms_loader *loader = loader_of(
            dataset, (ms_loader_options){ .batch = 1, .length = 5, .shuffle = true, .seed = 3 });
        uint32_t windows = (uint32_t)ms_loader_get_state(loader).samples, beginnings = 0,
                 in_order = 0;
        assert_true(windows >= 1 && windows * 5 <= sizes[s] && windows * 5 + 10 > sizes[s]);
        int64_t first_offset = -1;
        for (int epoch = 0; epoch < 4; epoch++) {
            char *seen = calloc(windows, 1);
            int64_t offset = -1, before = -1;
            for (uint32_t i = 0; i < windows; i++) {
                ms_batch batch = next(loader);
                int64_t begin = token(&batch, 5, 0, 0);
                if (offset < 0) offset = begin % 5;
                assert_int_equal(begin % 5, offset);
                assert_true(begin + 5 <= sizes[s]);
                /* A window is identified by its beginning; no two begin at the same place. */
                uint32_t window = (uint32_t)(begin / 5) % windows;
                assert_int_equal(seen[window], 0);
                seen[window] = 1;
                in_order += begin == before + 5;
                before = begin;
            }
            if (epoch == 0) first_offset = offset;
            beginnings += offset != first_offset;
            free(seen);
        }
        /* By chance, one window in `windows` follows the one before it. */
        if (windows > 50) assert_true(in_order < windows / 4 && beginnings > 0);
        ms_loader_free(loader);
        ms_dataset_release(dataset);
    }
}

static void test_the_seed_gives_the_order(void **state)
{
    (void)state;
    ms_dataset *dataset = counting_tokens(2000);
    int64_t first[3][40];
    const uint64_t seeds[] = { 1, 1, 2 };
    for (int i = 0; i < 3; i++) {
        ms_loader *loader = loader_of(
            dataset,
            (ms_loader_options){ .batch = 4, .length = 10, .shuffle = true, .seed = seeds[i] });
        ms_batch batch = next(loader);
        memcpy(first[i], batch.x, sizeof first[i]);
        ms_loader_free(loader);
    }
    assert_memory_equal(first[0], first[1], sizeof first[0]);
    assert_memory_not_equal(first[0], first[2], sizeof first[0]);
    ms_dataset_release(dataset);
}

/* All rows that `ranks` ranks get in `batches` batches of 12, beginning at *from; *from moves
 * on. */
static void collect_rows(ms_dataset *dataset, uint32_t ranks, int batches, ms_loader_state *from,
                         int64_t *rows)
{
    uint32_t each = 12 / ranks;
    ms_loader_state after = *from;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        ms_loader *loader = loader_of(dataset, (ms_loader_options){ .batch = 12,
                                                                    .length = 7,
                                                                    .shuffle = true,
                                                                    .seed = 99,
                                                                    .rank = rank,
                                                                    .ranks = ranks });
        assert_int_equal(ms_loader_set_state(&context, loader, *from), MS_OK);
        for (int i = 0; i < batches; i++) {
            ms_batch batch = next(loader);
            assert_int_equal(batch.rows, each);
            for (uint32_t row = 0; row < each; row++)
                rows[i * 12 + (int)(rank * each + row)] = token(&batch, 7, row, 0);
        }
        after = ms_loader_get_state(loader);
        ms_loader_free(loader);
    }
    *from = after;
}

static void test_ranks_share_a_batch_and_resume_at_any_number(void **state)
{
    (void)state;
    /* 99 windows of 7 with shuffling 98: epochs end inside batches */
    ms_dataset *dataset = counting_tokens(700);
    ms_loader *loader = loader_of(
        dataset, (ms_loader_options){ .batch = 12, .length = 7, .shuffle = true, .seed = 5 });
    ms_loader_state begin = ms_loader_get_state(loader), from;
    ms_loader_free(loader);
    int64_t alone[360], together[360];
    from = begin;
    collect_rows(dataset, 1, 30, &from, alone);
    ms_loader_state end = from;
    from = begin;
    static const uint32_t worlds[] = { 1, 4, 2, 3, 12, 6 };
    for (int i = 0; i < 6; i++) collect_rows(dataset, worlds[i], 5, &from, together + 60 * i);
    assert_memory_equal(alone, together, sizeof alone);
    assert_memory_equal(&from, &end, sizeof end);
    ms_dataset_release(dataset);
}

static void test_a_state_of_other_data_is_refused(void **state)
{
    (void)state;
    ms_dataset *dataset = counting_tokens(700);
    ms_loader *loader = loader_of(dataset, (ms_loader_options){ .batch = 2, .length = 7 });
    next(loader);
    ms_loader_state right = ms_loader_get_state(loader), wrong = right;
    wrong.samples++;
    assert_int_equal(ms_loader_set_state(&context, loader, wrong), MS_ERROR_MISMATCH);
    wrong = right;
    wrong.position = right.samples;
    assert_int_equal(ms_loader_set_state(&context, loader, wrong), MS_ERROR_MISMATCH);
    ms_batch batch = next(loader);
    assert_int_equal(token(&batch, 7, 0, 0), 14); /* it continues as if there had been no error */
    ms_loader_free(loader);
    ms_dataset_release(dataset);
}

static void test_batches_do_not_move_next_and_leave_nothing_out(void **state)
{
    (void)state;
    ms_dataset *dataset = counting_tokens(52);
    ms_loader *loader = loader_of(dataset, (ms_loader_options){ .batch = 4, .length = 5 });
    int64_t x[20], y[20];
    next(loader);
    uint32_t rows = 0;
    for (uint64_t i = 0;; i++) {
        ms_batch batch = { .x = x, .y = y, .x_bytes = sizeof x, .y_bytes = sizeof y };
        assert_int_equal(ms_loader_batch(&context, loader, i, &batch), MS_OK);
        if (!batch.rows) break;
        for (uint32_t row = 0; row < batch.rows; row++) assert_int_equal(x[row * 5], 5 * rows++);
    }
    assert_int_equal(rows, 10);
    ms_batch small = { .x = x, .y = y, .x_bytes = sizeof x - 1, .y_bytes = sizeof y };
    assert_int_equal(ms_loader_batch(&context, loader, 0, &small), MS_ERROR_ARGUMENT);
    ms_batch far = { .x = x, .y = y, .x_bytes = sizeof x, .y_bytes = sizeof y };
    assert_int_equal(ms_loader_batch(&context, loader, UINT64_MAX, &far), MS_OK);
    assert_int_equal(far.rows, 0);
    ms_batch batch = next(loader);
    assert_int_equal(token(&batch, 5, 0, 0), 20);
    ms_loader_free(loader);
    ms_dataset_release(dataset);
}

static void test_bad_options_are_refused(void **state)
{
    (void)state;
    static const struct {
        ms_loader_options options;
        const char *why;
    } bad[] = {
        { { .batch = 4, .length = 5, .ranks = 3 },
          "a batch of 4 does not divide by 3 ranks, which share it: take a multiple of 3" },
        { { .batch = 0, .length = 5 }, "a batch of 0: it takes at least one sample" },
        { { .batch = 1, .length = 52 }, "a length of 52 needs 53 tokens, the data set has 52" },
        { { .batch = 1 }, "give a length" },
        { { .batch = 2, .length = 5, .ranks = 2, .rank = 2 }, "rank 2 of 2" },
    };
    ms_dataset *dataset = counting_tokens(52);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ms_loader *loader = NULL;
        assert_int_equal(ms_loader_new(&context, dataset, &bad[i].options, &loader),
                         MS_ERROR_ARGUMENT);
        assert_non_null(strstr(context.error.message, bad[i].why));
        assert_null(loader);
    }
    ms_dataset_release(dataset);
}

static void test_a_loader_may_go_while_its_thread_works(void **state)
{
    (void)state;
    ms_dataset *dataset = counting_tokens(20000);
    for (int i = 0; i < 50; i++) {
        ms_loader *loader =
            loader_of(dataset, (ms_loader_options){ .batch = 64, .length = 128, .shuffle = true });
        for (int n = 0; n < i % 5; n++) next(loader);
        ms_loader_free(loader);
    }
    ms_dataset_release(dataset);
}

/* The same positions from the thread and from memory of the caller, which has room for no more. */
static void test_positions_of_packed_documents(void **state)
{
    (void)state;
    ms_dataset *dataset = counting_tokens(13);
    ms_loader *loader = loader_of(
        dataset, (ms_loader_options){ .batch = 2, .length = 6, .packed = true, .end_of_text = 3 });
    const int64_t expected[] = { 0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5 };
    int64_t *memory = malloc(3 * sizeof expected);
    ms_batch batch = next(loader), own = { .x = memory,
                                           .y = memory + 12,
                                           .positions = memory + 24,
                                           .x_bytes = sizeof expected,
                                           .y_bytes = sizeof expected };
    assert_memory_equal(batch.positions, expected, sizeof expected);
    assert_int_equal(ms_loader_batch(&context, loader, 0, &own), MS_OK);
    assert_memory_equal(own.positions, expected, sizeof expected);
    assert_memory_equal(own.x, batch.x, sizeof expected);
    assert_memory_equal(own.y, batch.y, sizeof expected);
    free(memory);
    ms_loader_free(loader);
    for (int64_t end = -1; end <= 65536; end += 65537) {
        ms_loader *none = NULL;
        ms_loader_options options = { .batch = 1, .length = 6, .packed = true, .end_of_text = end };
        assert_int_equal(ms_loader_new(&context, dataset, &options, &none), MS_ERROR_ARGUMENT);
        assert_non_null(strstr(context.error.message, "the ids of this data are 0 .. 65535"));
        assert_null(none);
    }
    ms_dataset_release(dataset);
}

/* ---------------------------------------------------------- each allocation */

static ms_status use_everything(ms_context *own)
{
    const char *path = in_folder("tokens"), *folder = in_folder("folder");
    ms_dataset *tokens = NULL, *bytes = NULL, *images = NULL, *first = NULL, *rest = NULL;
    ms_loader *loader = NULL;
    ms_batch batch;
    ms_status status = ms_dataset_tokens(own, &path, 1, &tokens);
    if (!status) status = ms_dataset_bytes(own, &folder, 1, &bytes);
    if (!status) status = ms_dataset_images(own, in_folder("images"), in_folder("labels"), &images);
    if (!status) status = ms_dataset_split(own, tokens, 0.5, &first, &rest);
    if (!status)
        status = ms_loader_new(
            own, first, &(ms_loader_options){ .batch = 2, .length = 3, .packed = true }, &loader);
    for (int i = 0; i < 5 && !status; i++) status = ms_loader_next(own, loader, &batch);
    ms_loader_free(loader);
    ms_dataset *all[] = { tokens, bytes, images, first, rest };
    for (int i = 0; i < 5; i++) ms_dataset_release(all[i]);
    return status;
}

static void test_each_allocation_may_fail(void **state)
{
    (void)state;
    uint16_t tokens[100] = { 0 };
    put_file(in_folder("tokens"), tokens, sizeof tokens);
    assert_int_equal(ms_folder_make(&context, in_folder("folder")), MS_OK);
    put_file(in_folder("folder/a"), "a", 1);
    put_packed(in_folder("images"), idx_images, sizeof idx_images);
    put_packed(in_folder("labels"), idx_labels, sizeof idx_labels);
    ms_status status = MS_ERROR_MEMORY;
    for (long n = 1; status; n++) {
        fault_os fault;
        ms_context own;
        fault_os_init(&fault);
        ms_context_init(&own, &fault.table);
        atomic_store(&fault.fail_at, n);
        status = use_everything(&own);
        /* Threads that cannot be started are the one failure here that is not memory. */
        assert_true(status == MS_OK || status == MS_ERROR_MEMORY
                    || strstr(own.error.message, "cannot start the loader's thread"));
        assert_int_equal(atomic_load(&fault.live), 0);
        assert_true(n < 200);
    }
}

#define in_new_folder(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_new_folder(test_bytes_of_files_and_folders),
        in_new_folder(test_token_shards_of_every_kind),
        in_new_folder(test_bad_shards_are_named_with_the_byte),
        in_new_folder(test_images_plain_and_packed),
        in_new_folder(test_bad_images_are_refused),
        in_new_folder(test_split_shares_and_divides),
        in_new_folder(test_windows_in_order_end_and_begin_again),
        in_new_folder(test_an_epoch_gives_each_window_once_from_a_new_beginning),
        in_new_folder(test_the_seed_gives_the_order),
        in_new_folder(test_ranks_share_a_batch_and_resume_at_any_number),
        in_new_folder(test_a_state_of_other_data_is_refused),
        in_new_folder(test_batches_do_not_move_next_and_leave_nothing_out),
        in_new_folder(test_bad_options_are_refused),
        in_new_folder(test_a_loader_may_go_while_its_thread_works),
        in_new_folder(test_positions_of_packed_documents),
        in_new_folder(test_each_allocation_may_fail),
    };
    ms_context_init(&context, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
