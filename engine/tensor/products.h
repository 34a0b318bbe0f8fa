/* products.h: results of products that a recomputed function keeps from its first run to the
 * second.
 *
 * Products (matmul, linear, conv2d, attention) cost the most of a function, and what is between
 * them the most memory. So a function may be run again without them: in the first run each product
 * notes what it has made, in the second one it takes this, in the same order, and computes nothing.
 * A result that was written to in between is made again. */
#ifndef MOONSHARD_TENSOR_PRODUCTS_H
#define MOONSHARD_TENSOR_PRODUCTS_H

#include "moonshard/tensor.h"

/* Of one function; zero-filled: nothing is kept. */
typedef struct ms_kept_products {
    struct ms_kept_product {
        ms_tensor *tensor; /* an alias */
        uint64_t version;
    } * items;
    size_t count, capacity, next; /* next: the one that the next product takes */
    bool again;                   /* the second run */
} ms_kept_products;

/* The list that products note in or take from, from here to the next call; NULL: none. Returns the
 * one before. */
ms_kept_products *ms_products_set(ms_engine *engine, ms_kept_products *kept);
/* Whether a run of a function that keeps products is on. */
bool ms_products_are_kept(const ms_engine *engine);
/* In the second run: *out is a new alias of what the first one has made here. Else *out is NULL:
 * the result must be made. MS_ERROR_STATE if the runs do not make the same products. */
ms_status ms_products_take(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                           ms_tensor **out);
/* In the first run: keeps a result that was made. Nothing else may overwrite it without counting as
 * a write. */
ms_status ms_products_note(ms_engine *engine, ms_tensor *made);
void ms_products_free(ms_context *context, ms_kept_products *kept);

#endif
