/* driver.c: runs a fuzz target without libFuzzer: on each seed, then on seeds that are changed at
 * random, in the same way in every run. Each input is a block of memory of its own, so that the
 * address sanitizer sees a read after its end.
 *     node_list SEEDS
 * MOONSHARD_TEST_FULL=1 makes it run a hundred times as many. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { SEEDS_MAX = 64, BYTES_MAX = 8192, CHANGES_MAX = 8, PIECE_MAX = 16 };

typedef struct input {
    size_t size;
    uint8_t bytes[BYTES_MAX];
} input;

/* Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014 (SplitMix64). */
static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static size_t below(uint64_t *state, size_t limit) { return (size_t)(draw(state) % limit); }

static void remove_piece(input *one, size_t at, size_t bytes)
{
    if (bytes > one->size - at) bytes = one->size - at;
    memmove(one->bytes + at, one->bytes + at + bytes, one->size - at - bytes);
    one->size -= bytes;
}

static void insert_piece(input *one, size_t at, const uint8_t *piece, size_t bytes)
{
    if (bytes > BYTES_MAX - one->size) return;
    memmove(one->bytes + at + bytes, one->bytes + at, one->size - at);
    memcpy(one->bytes + at, piece, bytes);
    one->size += bytes;
}

/* One change: a byte becomes another, a piece vanishes, or one of a seed appears. */
static void change(input *one, const input *seed, uint64_t *state)
{
    size_t at = below(state, one->size + 1), from = below(state, seed->size + 1);
    size_t bytes = 1 + below(state, PIECE_MAX);
    uint8_t byte = (uint8_t)draw(state);
    if (bytes > seed->size - from) bytes = seed->size - from;
    switch (below(state, 4)) {
    case 0:
        if (at < one->size) one->bytes[at] = byte;
        break;
    case 1: insert_piece(one, at, &byte, 1); break;
    case 2: remove_piece(one, at, 1 + below(state, PIECE_MAX)); break;
    default: insert_piece(one, at, seed->bytes + from, bytes);
    }
}

static void run(const input *one)
{
    uint8_t *block = malloc(one->size + !one->size);
    if (!block) abort();
    memcpy(block, one->bytes, one->size);
    LLVMFuzzerTestOneInput(block, one->size);
    free(block);
}

/* By name, so that a run is the same on every file system. */
static size_t read_seeds(const char *folder, input *seeds)
{
    struct dirent **entries = NULL;
    int found = scandir(folder, &entries, NULL, alphasort);
    size_t count = 0;
    for (int i = 0; i < found; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        FILE *file = entries[i]->d_name[0] != '.' && count < SEEDS_MAX ? fopen(path, "rb") : NULL;
        if (file) {
            seeds[count].size = fread(seeds[count].bytes, 1, BYTES_MAX, file);
            count++;
            fclose(file);
        }
        free(entries[i]);
    }
    free(entries);
    return count;
}

int main(int count, char **arguments)
{
    static input seeds[SEEDS_MAX], one;
    const char *full = getenv("MOONSHARD_TEST_FULL");
    const unsigned long runs = full && strcmp(full, "1") == 0 ? 2000000 : 20000;
    size_t known = count == 2 ? read_seeds(arguments[1], seeds) : 0;
    uint64_t state = 1;
    if (known == 0) {
        fprintf(stderr, "a folder with seeds is needed\n");
        return 2;
    }
    for (size_t i = 0; i < known; i++) run(&seeds[i]);
    for (unsigned long i = 0; i < runs; i++) {
        one = seeds[below(&state, known)];
        for (size_t changes = 1 + below(&state, CHANGES_MAX); changes > 0; changes--)
            change(&one, &seeds[below(&state, known)], &state);
        run(&one);
    }
    printf("%zu seeds and %lu changed ones\n", known, runs);
    return 0;
}
