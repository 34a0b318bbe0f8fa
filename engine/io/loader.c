/* loader.c: batches of a data set: which sample comes when, and the thread that prepares them
 * ahead.
 *
 * The host and the thread share a ring of slots. `filled` is written by the thread, `taken` by the
 * host; a slot belongs to the thread from the moment that the host asks for the next one.
 * Everything else is either constant or one side's own. */
#include "io/dataset.h"

#include <inttypes.h>
#include <string.h>

#include "base/thread.h"

#define SLOTS 3 /* one in the host's hands, two ahead */
/* With more windows than this, an epoch gives up one window, so that its offset can be chosen
 * within a whole window. With fewer, one window would be too large a part of the data. */
#define OFFSET_WINDOWS 16

/* A batch that the thread has filled, and the state after it. The state goes with the batch, so
 * that ms_loader_get_state counts the batches handed out and not those prepared ahead. */
typedef struct ms_prepared {
    void *x, *y, *positions; /* positions: NULL unless packed */
    ms_loader_state after;
} ms_prepared;

/* options, windows, x_row and y_row are constant. seed and state change on the host while no thread
 * runs, and state also in ms_loader_next, after the thread has copied it. Slots, filled, taken,
 * stop and the bell are shared with the thread; see the first lines of this file. */
struct ms_loader {
    ms_context context; /* of the host side, for memory */
    ms_dataset *dataset;
    ms_loader_options options;
    uint64_t seed;         /* options.seed, or that of a state; changes only while no thread runs */
    uint64_t windows;      /* samples of an epoch */
    size_t x_row, y_row;   /* bytes of a row */
    ms_loader_state state; /* what has been handed out */
    ms_prepared slots[SLOTS];
    ms_os_thread *thread; /* NULL until the first next */
    int64_t process;      /* that the thread runs in: a forked child has none */
    ms_bell bell;
    _Atomic uint64_t filled, taken; /* slots filled and handed out since the thread started */
    atomic_bool stop;
};

/* -------------------------------------------------------------------- order */

/* A number below `bound`, the same for the same arguments on every machine. The upper half of the
 * 128-bit product replaces a modulo; its bias is below bound / 2^64. */
static uint64_t draw_below(uint64_t seed, uint64_t epoch, uint64_t what, uint64_t bound)
{
    uint32_t numbers[4];
    ms_philox(seed, epoch, what, numbers);
    uint64_t random = (uint64_t)numbers[1] << 32 | numbers[0];
    return (uint64_t)(((unsigned __int128)random * bound) >> 64);
}

/* The image of `index` under a permutation of 0 .. count-1, without a table: memory does not grow
 * with the data, and any position can be computed on its own, which lets a loader resume anywhere.
 * It is a Feistel network of six rounds of philox over the next power of four; a Feistel network is
 * a bijection for every round function. A result outside the range is sent through again until it
 * is inside (cycle walking), which stays a bijection and takes fewer than four turns on
 * average. */
static uint64_t permute(uint64_t seed, uint64_t epoch, uint64_t count, uint64_t index)
{
    uint32_t half = 1;
    /* The domain is 2^(2 half), at most four times count. */
    while (half < 32 && UINT64_C(1) << (2 * half) < count) half++;
    uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t round = 1; round <= 6; round++) {
            uint32_t numbers[4];
            ms_philox(seed, epoch, round << 32 | right, numbers);
            uint64_t next = (left ^ numbers[0]) & mask;
            left = right;
            right = next;
        }
        index = left << half | right;
    } while (index >= count);
    return index;
}

/* Where the windows of an epoch begin. With shuffling each epoch has another offset, so that the
 * borders between windows fall on different tokens and every pair of neighbours is learned. */
static uint64_t epoch_offset(const ms_loader *loader, uint64_t epoch)
{
    /* Only tokens come here: images have no windows. room is 0 or more, as count_windows has left
     * it. */
    uint64_t room = loader->dataset->count - 1 - loader->windows * loader->options.length;
    return loader->options.shuffle ? draw_below(loader->seed, epoch, 0, room + 1) : 0;
}

/* Which sample is at a position of the epoch's order. */
static uint64_t sample_at(const ms_loader *loader, uint64_t epoch, uint64_t position)
{
    return loader->options.shuffle ? permute(loader->seed, epoch, loader->windows, position)
                                   : position;
}

/* ------------------------------------------------------------------ filling */

/* Tokens as i64, the type of indices. Bytes are put together one by one: files are little-endian,
 * the machine need not be, and a shard's tokens need not be aligned. The loops are bound by memory:
 * 8 bytes are written for each token. They run on the loader's thread, beside training. */
static void widen_tokens(const uint8_t *from, uint32_t width, size_t count, int64_t *to)
{
    if (width == 1) {
        for (size_t i = 0; i < count; i++) to[i] = from[i];
        return;
    }
    if (width == 2) {
        for (size_t i = 0; i < count; i++) to[i] = from[2 * i] | from[2 * i + 1] << 8;
        return;
    }
    for (size_t i = 0; i < count; i++)
        to[i] = (int64_t)(from[4 * i] | (uint32_t)from[4 * i + 1] << 8
                          | (uint32_t)from[4 * i + 2] << 16 | (uint32_t)from[4 * i + 3] << 24);
}

/* Writes one image, scaled from 0 .. 255 to 0 .. 1, and its label. `sample` counts from the start
 * of the data, not of the dataset, which may be a part of it. */
static void fill_image(const ms_data *data, uint64_t sample, float *x, int64_t *y)
{
    size_t pixels = (size_t)data->rows * data->columns;
    const uint8_t *from = data->samples + sample * pixels;
    for (size_t i = 0; i < pixels; i++) x[i] = (float)from[i] / 255.0f;
    *y = data->labels[sample];
}

/* The place of each token in its document. The id that ends a document belongs to it; the next
 * token begins one. A row begins a document, too: what came before it is not in the row. */
static void fill_positions(const int64_t *tokens, uint32_t count, int64_t end_of_text,
                           int64_t *positions)
{
    int64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        positions[i] = at;
        at = tokens[i] == end_of_text ? 0 : at + 1;
    }
}

/* The targets that begin at `first` and are none by the mask become -100, which the loss passes
 * over. */
static void leave_out(const uint8_t *masks, uint64_t first, uint32_t count, int64_t *y)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = first + i;
        if (!(masks[at / 8] >> at % 8 & 1)) y[i] = -100;
    }
}

/* Writes one sample. For tokens, y is x one token later, which is why a sample needs length + 1
 * tokens. y is the same where documents are packed: after the end of a text, the model learns how
 * texts begin. */
static void fill_row(const ms_loader *loader, uint64_t epoch, uint64_t position, void *x, void *y,
                     void *positions)
{
    const ms_dataset *dataset = loader->dataset;
    const ms_data *data = dataset->data;
    uint64_t sample = sample_at(loader, epoch, position);
    /* The one place that tells images from tokens while filling. */
    if (data->labels) {
        fill_image(data, dataset->first + sample, x, y);
        return;
    }
    uint64_t begin = dataset->first + epoch_offset(loader, epoch) + sample * loader->options.length;
    widen_tokens(data->samples + begin * data->width, data->width, loader->options.length, x);
    widen_tokens(data->samples + (begin + 1) * data->width, data->width, loader->options.length, y);
    if (data->masks) leave_out(data->masks, begin + 1, loader->options.length, y);
    if (loader->options.packed)
        fill_positions(x, loader->options.length, loader->options.end_of_text, positions);
}

/* Writes rows first .. first+rows-1 of the batch that begins at `state`. A batch may cross the end
 * of an epoch; its remaining rows come from the next one, so every batch is full. */
static void fill(const ms_loader *loader, ms_loader_state state, uint32_t first, uint32_t rows,
                 void *x, void *y, void *positions)
{
    for (uint32_t i = 0; i < rows; i++) {
        /* Positions of one batch may belong to two epochs. */
        uint64_t at = state.position + first + i;
        fill_row(loader, state.epoch + at / loader->windows, at % loader->windows,
                 (char *)x + i * loader->x_row, (char *)y + i * loader->y_row,
                 positions ? (char *)positions + i * loader->x_row : NULL);
    }
}

/* The state after one batch. It moves by the whole batch of all ranks, so the state is the same on
 * each of them and does not depend on the number of ranks. */
static ms_loader_state advance(const ms_loader *loader, ms_loader_state state)
{
    uint64_t at = state.position + loader->options.batch;
    state.epoch += at / loader->windows;
    state.position = at % loader->windows;
    return state;
}

/* ------------------------------------------------------------------- thread */

/* The thread: fills slots in turn, starting from loader->state, which the host does not change
 * before the first batch is filled. The bell is read before the conditions, so that a ring between
 * the test and the wait is not lost. The store to `filled` publishes the slot: it comes after all
 * writes to it. */
static void prepare(void *argument)
{
    ms_loader *loader = argument;
    ms_loader_state state = loader->state;
    uint32_t rows = ms_loader_rows(loader);
    for (uint64_t done = 0;; done++) {
        for (;;) {
            uint32_t seen = ms_bell_read(&loader->bell);
            if (atomic_load(&loader->stop)) return;
            /* The slot taken last stays the host's until it asks again. */
            if (done < atomic_load(&loader->taken) + SLOTS - 1) break;
            ms_bell_wait(&loader->bell, seen, (ms_spin){ 0 });
        }
        ms_prepared *slot = &loader->slots[done % SLOTS];
        fill(loader, state, loader->options.rank * rows, rows, slot->x, slot->y, slot->positions);
        slot->after = state = advance(loader, state);
        atomic_store(&loader->filled, done + 1);
        ms_bell_ring(&loader->bell);
    }
}

/* After this the host may write everything. Batches prepared ahead are lost; the next start makes
 * them again from the state. */
static void stop_thread(ms_loader *loader)
{
    const ms_os *os = loader->context.os;
    if (!loader->thread) return;
    atomic_store(&loader->stop, true);
    ms_bell_ring(&loader->bell);
    os->thread_join(os->user, loader->thread);
    loader->thread = NULL;
}

/* The slots' memory is taken once and kept when the thread is stopped and started again. An error
 * leaves what it has taken to ms_loader_free or to the next attempt. */
static ms_status make_slot(ms_context *context, const ms_loader *loader, ms_prepared *slot)
{
    size_t rows = ms_loader_rows(loader);
    ms_status status = MS_OK;
    if (!slot->x) status = ms_bytes_new(context, loader->x_row * rows, "a batch", &slot->x);
    if (!status && !slot->y)
        status = ms_bytes_new(context, loader->y_row * rows, "a batch", &slot->y);
    if (!status && !slot->positions && loader->options.packed)
        status = ms_bytes_new(context, loader->x_row * rows, "a batch", &slot->positions);
    return status;
}

static ms_status start_thread(ms_context *context, ms_loader *loader)
{
    const ms_os *os = context->os;
    for (int i = 0; i < SLOTS; i++) {
        ms_status status = make_slot(context, loader, &loader->slots[i]);
        if (status) return status;
    }
    /* The thread does not run, so the order of these stores does not matter; its start publishes
     * them. */
    atomic_store(&loader->filled, 0);
    atomic_store(&loader->taken, 0);
    atomic_store(&loader->stop, false);
    loader->process = os->process_id(os->user);
    int error = os->thread_start(os->user, "ms-loader", prepare, loader, &loader->thread);
    return error ? ms_fail_os(context, error, "cannot start the loader's thread", NULL) : MS_OK;
}

/* ------------------------------------------------------------------- public */

/* An id that no token of the data can be would make one document of all of them, without a word. */
static ms_status check_packed(ms_context *context, const ms_dataset *dataset,
                              const ms_loader_options *options)
{
    if (!options->packed) return MS_OK;
    if (!ms_dataset_has_tokens(dataset))
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "loader: images have no documents to pack; leave packed out");
    uint32_t width = dataset->data->width;
    int64_t most = (int64_t)((UINT64_C(1) << (8 * width)) - 1);
    if (options->end_of_text >= 0 && options->end_of_text <= most) return MS_OK;
    return ms_fail(context, MS_ERROR_ARGUMENT,
                   "loader: end_of_text is %" PRId64 ", but the ids of this data are 0 .. %" PRId64
                   ", of %u bytes each",
                   options->end_of_text, most, width);
}

/* Checks the options that depend on the data only by its kind. A batch must divide by the ranks:
 * with parts of different sizes, a mean over ranks would not be the mean over the batch. */
static ms_status check_options(ms_context *context, bool tokens, const ms_loader_options *options)
{
    if (!tokens && options->length)
        return ms_fail(context, MS_ERROR_ARGUMENT, "loader: images have no length; leave it out");
    if (tokens && !options->length)
        return ms_fail(context, MS_ERROR_ARGUMENT, "loader: give a length, the tokens of a sample");
    if (options->batch == 0)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "loader: a batch of 0: it takes at least one sample for each rank (%u)",
                       options->ranks);
    if (options->batch % options->ranks != 0)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "loader: a batch of %u does not divide by %u ranks, which share it: take a "
                       "multiple of %u",
                       options->batch, options->ranks, options->ranks);
    /* A rank outside would be given rows past the batch. */
    if (options->rank >= options->ranks)
        return ms_fail(context, MS_ERROR_ARGUMENT, "loader: rank %u of %u", options->rank,
                       options->ranks);
    return MS_OK;
}

/* The samples of an epoch: images, or windows of `length` tokens that do not overlap. */
static ms_status count_windows(ms_context *context, const ms_dataset *dataset,
                               const ms_loader_options *options, uint64_t *windows)
{
    bool tokens = ms_dataset_has_tokens(dataset);
    ms_status status = check_options(context, tokens, options);
    if (!status) status = check_packed(context, dataset, options);
    if (status) return status;
    uint64_t count = dataset->count;
    if (tokens) {
        /* A sample needs one token more than its length, for y. */
        count = count > options->length ? (count - 1) / options->length : 0;
        if (options->shuffle && count > OFFSET_WINDOWS) count--;
    }
    if (count == 0 && tokens)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "loader: a length of %u needs %u tokens, the data set has %" PRIu64
                       ": take more data or a smaller length",
                       options->length, options->length + 1, dataset->count);
    if (count == 0) return ms_fail(context, MS_ERROR_ARGUMENT, "loader: the data set is empty");
    *windows = count;
    return MS_OK;
}

/* Takes no memory for batches and starts no thread; the first ms_loader_next does. A loader that is
 * only used by ms_loader_batch needs neither. */
ms_status ms_loader_new(ms_context *context, ms_dataset *dataset, const ms_loader_options *given,
                        ms_loader **out)
{
    ms_loader_options options = *given;
    ms_loader *loader = NULL;
    uint64_t windows = 0;
    if (options.ranks == 0) options.ranks = 1;
    ms_status status = count_windows(context, dataset, &options, &windows);
    if (!status) status = ms_allocate(context, sizeof *loader, "a loader", (void **)&loader);
    if (status) return status;
    ms_context_init(&loader->context, context->os);
    loader->dataset = ms_dataset_retain(dataset);
    loader->options = options;
    loader->seed = options.seed;
    loader->windows = windows;
    loader->state = (ms_loader_state){ .seed = options.seed, .samples = windows };
    const ms_data *data = dataset->data;
    bool tokens = ms_dataset_has_tokens(dataset);
    loader->x_row = tokens ? options.length * sizeof(int64_t)
                           : (size_t)data->rows * data->columns * sizeof(float);
    loader->y_row = tokens ? loader->x_row : sizeof(int64_t);
    size_t bytes;
    if (!ms_multiply(loader->x_row, options.batch, &bytes)) {
        ms_loader_free(loader);
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "loader: a batch of %u samples is larger than any memory", options.batch);
    }
    *out = loader;
    return MS_OK;
}

/* The thread is joined first, since it reads the data set and writes the slots. */
void ms_loader_free(ms_loader *loader)
{
    if (loader == NULL) return;
    ms_context context = loader->context;
    stop_thread(loader);
    for (int i = 0; i < SLOTS; i++) {
        ms_release(&context, loader->slots[i].x);
        ms_release(&context, loader->slots[i].y);
        ms_release(&context, loader->slots[i].positions);
    }
    ms_dataset_release(loader->dataset);
    ms_release(&context, loader);
}

uint64_t ms_loader_memory(const ms_loader *loader)
{
    uint64_t row = loader->x_row + loader->y_row;
    if (loader->options.packed) row += loader->x_row;
    return loader->slots[0].x ? SLOTS * row * ms_loader_rows(loader) : 0;
}

/* A batch divides by the ranks: check_options has seen to it. */
uint32_t ms_loader_rows(const ms_loader *loader)
{
    return loader->options.batch / loader->options.ranks;
}

bool ms_loader_is_packed(const ms_loader *loader) { return loader->options.packed; }
bool ms_loader_is_masked(const ms_loader *loader) { return ms_dataset_is_masked(loader->dataset); }

/* shape[2] is 0 for tokens, which have two dimensions. */
uint32_t ms_loader_shape(const ms_loader *loader, uint32_t rows, ms_dtype *dtype, int64_t shape[3])
{
    bool tokens = ms_dataset_has_tokens(loader->dataset);
    *dtype = tokens ? MS_I64 : MS_F32;
    shape[0] = rows;
    shape[1] = tokens ? loader->options.length : loader->dataset->data->rows;
    shape[2] = tokens ? 0 : loader->dataset->data->columns;
    return tokens ? 2 : 3;
}

/* Asking for a batch gives back the slot of the last one: the store to `taken` lets the thread fill
 * it. A forked child has the loader's memory, but no thread that would ever fill a slot; the
 * comparison of process numbers turns that endless wait into an error. */
ms_status ms_loader_next(ms_context *context, ms_loader *loader, ms_batch *out)
{
    ms_status status = loader->thread ? MS_OK : start_thread(context, loader);
    if (!status && loader->process != context->os->process_id(context->os->user))
        status = ms_fail(context, MS_ERROR_STATE,
                         "loader: this process was forked from the one in which its thread runs: "
                         "make the loader after the fork");
    if (status) return status;
    uint64_t taken = atomic_load(&loader->taken);
    for (;;) {
        uint32_t seen = ms_bell_read(&loader->bell);
        if (atomic_load(&loader->filled) > taken) break;
        ms_bell_wait(&loader->bell, seen, (ms_spin){ 0 });
    }
    ms_prepared *slot = &loader->slots[taken % SLOTS];
    uint32_t rows = ms_loader_rows(loader);
    *out = (ms_batch){ .x = slot->x,
                       .y = slot->y,
                       .positions = slot->positions,
                       .x_bytes = rows * loader->x_row,
                       .y_bytes = rows * loader->y_row,
                       .rows = rows };
    loader->state = slot->after;
    atomic_store(&loader->taken, taken + 1);
    ms_bell_ring(&loader->bell);
    return MS_OK;
}

/* ms_loader_batch rounds down to equal rows for all ranks, which may leave none. */
ms_status ms_loader_check_pass(ms_context *context, const ms_loader *loader)
{
    const ms_loader_options *options = &loader->options;
    if (loader->windows >= options->ranks) return MS_OK;
    if (!ms_dataset_has_tokens(loader->dataset))
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "loader: %" PRIu64 " samples for %u ranks; each rank needs at least one",
                       loader->windows, options->ranks);
    return ms_fail(context, MS_ERROR_ARGUMENT,
                   "loader: %" PRIu64 " window%s of %u tokens for %u ranks; each rank needs at "
                   "least one: take more data, a smaller length or fewer ranks",
                   loader->windows, loader->windows == 1 ? "" : "s", options->length,
                   options->ranks);
}

/* Fills on the caller's thread and reads only what is constant and the seed, so it can be used
 * while the thread prepares batches. Validation uses it to visit each sample once. */
ms_status ms_loader_batch(ms_context *context, const ms_loader *loader, uint64_t index,
                          ms_batch *out)
{
    const ms_loader_options *options = &loader->options;
    uint64_t at;
    uint32_t rows = 0;
    if (!__builtin_mul_overflow(index, options->batch, &at) && at < loader->windows) {
        uint64_t left = loader->windows - at;
        /* Every rank gets as many rows as the others, so that a mean over ranks is one over rows:
         * up to ranks-1 samples are left out. */
        rows = (uint32_t)(left < options->batch ? left : options->batch) / options->ranks;
    }
    if (rows * loader->x_row > out->x_bytes || rows * loader->y_row > out->y_bytes)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "loader: a batch of %u rows needs %zu and %zu bytes", rows,
                       rows * loader->x_row, rows * loader->y_row);
    ms_loader_state state = { .epoch = 0, .position = rows ? at : 0 };
    fill(loader, state, options->rank * rows, rows, out->x, out->y, out->positions);
    out->x_bytes = rows * loader->x_row;
    out->y_bytes = rows * loader->y_row;
    out->rows = rows;
    return MS_OK;
}

/* ms_loader_next has set it from the batch that it handed out, so what the thread has prepared
 * ahead is not in it. */
ms_loader_state ms_loader_get_state(const ms_loader *loader) { return loader->state; }

/* The number of samples represents the data set's identity: a position means something only with
 * the same windows. The seed comes with the state, since the order depends on it. */
ms_status ms_loader_set_state(ms_context *context, ms_loader *loader, ms_loader_state state)
{
    if (state.samples != loader->windows || state.position >= loader->windows)
        return ms_fail(context, MS_ERROR_MISMATCH,
                       "loader: the state is that of %" PRIu64
                       " samples an epoch, here there are %" PRIu64
                       "; data, length and shuffle must be the same",
                       state.samples, loader->windows);
    stop_thread(loader);
    loader->state = state;
    loader->seed = state.seed;
    return MS_OK;
}
