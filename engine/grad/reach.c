/* reach.c: which leaves a graph goes back to. */
#include "grad/tape.h"

/* A node that was met, and the backward that had seen it before: put back at the end, as a backward may be running. */
typedef struct met { ms_node *node; uint64_t visit; } met;
typedef struct walk { ms_context *context; met *nodes; size_t count, capacity; uint64_t visit; } walk;

static ms_status meet(walk *w, ms_node *node)
{
    if (!node || node->visit == w->visit) return MS_OK;
    ms_status status = ms_grow(w->context, (void **)&w->nodes, &w->capacity, w->count + 1, sizeof *w->nodes);
    if (status) return status;
    w->nodes[w->count++] = (met){ node, node->visit };
    node->visit = w->visit;
    return MS_OK;
}

ms_status ms_graph_reaches(ms_engine *engine, ms_tensor *const *roots, uint32_t count, ms_tensor *const *leaves, uint32_t leaf_count, bool *reached)
{
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(engine, &tape);
    if (status) return status;
    walk w = { .context = ms_engine_context(engine), .visit = ++tape->visits };
    for (uint32_t i = 0; i < count && !status; i++) {
        const ms_meta *meta = roots[i]->meta;
        if (meta) status = meet(&w, meta->node ? meta->node : meta->accumulator);
    }
    for (size_t i = 0; i < w.count && !status; i++)
        for (uint32_t e = 0; e < w.nodes[i].node->input_count && !status; e++) status = meet(&w, w.nodes[i].node->edges[e].node);
    for (uint32_t i = 0; i < leaf_count && !status; i++) {
        const ms_meta *meta = leaves[i]->meta;
        reached[i] = meta && meta->accumulator && meta->accumulator->visit == w.visit;
    }
    for (size_t i = 0; i < w.count; i++) w.nodes[i].node->visit = w.nodes[i].visit;
    ms_release(w.context, w.nodes);
    return status;
}
