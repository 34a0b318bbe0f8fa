/* link_costs.c: what each link of a chain costs, in bytes and in time. */
#include "meter/link_costs.h"

/* Time marks of a bucket: links that wrap work twice. A link beyond the limit is counted with the
 * link before it. */
enum { MOST_LINKS = 32, MARKS_PER_LINK = 2 };

/* The accounts of one chain. The arrays follow the record in the same allocation. A link wraps work
 * twice if it encodes and decodes, hence two marks for each. */
struct ms_link_costs {
    ms_engine *engine;
    uint32_t buckets, links;
    uint32_t most_marks; /* of a bucket */
    ms_marks *marks;
    /* Two sets, for each bucket: the link to which the time before each mark, and after the last
     * one, is charged; and the number of marks. */
    uint8_t *owners, *used;
    /* Index 0: charged to no link. */
    ms_link_stats counts[MOST_LINKS + 1], step_counts[MOST_LINKS + 1], times[MOST_LINKS + 1];
    /* Of the bucket that is being reduced: the link that works, where its marks are, which links
     * had a part so far, the last mark, and the traffic when the link began. */
    uint32_t owner;
    size_t place;
    uint64_t seen;
    ms_point last;
    ms_traffic traffic;
};

/* All groups, because a link may use groups of its own, and since only this bucket's work is
 * enqueued between two calls. Calls are not added: one reduction may consist of many collectives.
 */
ms_traffic ms_link_costs_traffic(const ms_engine *engine)
{
    ms_traffic sum = ms_comm_traffic(engine, MS_COLLECTIVES);
    sum.calls = 0;
    return sum;
}

/* Two sets of marks for each bucket: one is written while the other may still be read. */
ms_status ms_link_costs_new(ms_group *group, uint32_t buckets, uint32_t links, ms_link_costs **out)
{
    ms_engine *engine = ms_group_engine(group);
    void *memory = NULL;
    if (links < 2) return MS_OK;
    if (links > MOST_LINKS) links = MOST_LINKS;
    /* One owner more than marks, and one count of marks, for each bucket of each set. */
    size_t marks = MARKS_PER_LINK * links, bytes = 2 * buckets * (marks + 2);
    ms_status status = ms_allocate(ms_engine_context(engine), sizeof(ms_link_costs) + bytes,
                                   "a chain's accounts", &memory);
    if (status) return status;
    ms_link_costs *costs = memory;
    costs->engine = engine;
    costs->buckets = buckets;
    costs->links = links;
    costs->most_marks = (uint32_t)marks;
    costs->owners = (uint8_t *)(costs + 1);
    costs->used = costs->owners + 2 * buckets * (marks + 1);
    status = ms_marks_new(engine, (uint32_t)(2 * buckets * marks), &costs->marks);
    if (status) {
        ms_link_costs_free(costs);
        return status;
    }
    *out = costs;
    return MS_OK;
}

/* The marks' memory stays with the engine until the streams have passed them. */
void ms_link_costs_free(ms_link_costs *costs)
{
    if (!costs) return;
    ms_marks_free(costs->marks);
    ms_release(ms_engine_context(costs->engine), costs);
}

/* Index of a bucket's marks in one of the two sets. */
static size_t place_of(const ms_link_costs *costs, uint32_t set, uint32_t bucket)
{
    return (size_t)set * costs->buckets + bucket;
}

/* The first mark of the bucket at that place. */
static uint32_t marks_at(const ms_link_costs *costs, size_t place)
{
    return (uint32_t)place * costs->most_marks;
}

/* One more owner than marks: the last one is charged from the last mark to the reduction's end. */
static uint8_t *owners_at(const ms_link_costs *costs, size_t place)
{
    return costs->owners + place * (costs->most_marks + 1);
}

/* Charges the bytes since the present link began to it. */
static void charge_traffic(ms_link_costs *costs)
{
    ms_traffic now = ms_link_costs_traffic(costs->engine);
    ms_link_stats *link = &costs->counts[costs->owner];
    link->payload_bytes += now.payload_bytes - costs->traffic.payload_bytes;
    link->wire_bytes += now.wire_bytes - costs->traffic.wire_bytes;
    link->between_nodes_bytes += now.between_nodes_bytes - costs->traffic.between_nodes_bytes;
    costs->traffic = now;
}

/* What ms_bucket_account calls: from now on `link` works. A mark is needed only where something was
 * enqueued since the last one. Work on another stream than the communication stream gets no mark,
 * and its time is not charged. */
static ms_status account(void *user, uint32_t link)
{
    ms_link_costs *costs = user;
    uint8_t *used = &costs->used[costs->place];
    ms_stream *stream = ms_engine_current(costs->engine);
    ms_point now = ms_stream_last(stream);
    ms_status status = MS_OK;
    /* A link beyond the limit is counted with the last one. */
    if (link > costs->links) link = costs->links;
    if (link == costs->owner) return MS_OK;
    charge_traffic(costs);
    if (now.stream == costs->last.stream && now.seq != costs->last.seq
        && *used < costs->most_marks) {
        status = ms_marks_set(costs->marks, marks_at(costs, costs->place) + *used, stream);
        ++*used;
        costs->last = ms_stream_last(stream);
    }
    if (now.stream == costs->last.stream) owners_at(costs, costs->place)[*used] = (uint8_t)link;
    costs->owner = link;
    /* A link that encodes and decodes counts once for a bucket. */
    if (!(costs->seen >> link & 1)) costs->counts[link].calls++;
    costs->seen |= (uint64_t)1 << link;
    return status;
}

/* Work before the first call of `account` is charged to no link. bit 0 of `seen` represents "no
 * link", which counts no calls. The first bucket starts the counts of a pass. */
void ms_link_costs_begin(ms_link_costs *costs, ms_bucket *bucket, uint32_t set)
{
    if (!costs) return;
    if (bucket->index == 0)
        for (uint32_t i = 0; i <= costs->links; i++) costs->counts[i] = (ms_link_stats){ 0 };
    costs->place = place_of(costs, set, bucket->place);
    costs->owner = 0;
    costs->used[costs->place] = owners_at(costs, costs->place)[0] = 0;
    costs->seen = 1;
    costs->last = ms_stream_last(ms_engine_current(costs->engine));
    costs->traffic = ms_link_costs_traffic(costs->engine);
    bucket->account = account;
    bucket->account_user = costs;
}

/* The last link is charged up to here. The pointer is cleared first: nothing that follows belongs
 * to this bucket. */
ms_status ms_link_costs_end(ms_link_costs *costs, ms_bucket *bucket)
{
    if (!costs) return MS_OK;
    bucket->account = NULL;
    return account(costs, 0);
}

/* Gradients may be reduced again before the step ends; its counts are those of the last pass. */
void ms_link_costs_step_end(ms_link_costs *costs)
{
    for (uint32_t i = 0; costs && i <= costs->links; i++) costs->step_counts[i] = costs->counts[i];
}

/* How much of a .. b is in from .. to. */
static uint64_t overlap(uint64_t a, uint64_t b, uint64_t from, uint64_t to)
{
    uint64_t begin = a > from ? a : from;
    uint64_t end = b < to ? b : to;
    return end > begin ? end - begin : 0;
}

/* Each span between two marks is charged to the owner of that span. `exposed` is the part of it in
 * which the model's stream waited. The spans of the reductions come from pass_times.c; a link's
 * share of one begins where the link before it ended. Exposed time of all links adds up to that of
 * the pass, as far as reductions ran then. */
void ms_link_costs_harvest(ms_link_costs *costs, uint32_t set, const bool *reduced,
                           const ms_span *spans, uint64_t wait, uint64_t ready)
{
    if (!costs) return;
    for (uint32_t i = 0; i <= costs->links; i++) costs->times[i] = (ms_link_stats){ 0 };
    for (uint32_t b = 0; b < costs->buckets; b++) {
        if (!reduced[b]) continue;
        size_t place = place_of(costs, set, b);
        uint64_t from = spans[b].begin, to;
        for (uint32_t k = 0; k <= costs->used[place]; k++) {
            to = spans[b].end;
            if (k < costs->used[place])
                ms_marks_time(costs->marks, marks_at(costs, place) + k, &to);
            ms_link_stats *link = &costs->times[owners_at(costs, place)[k]];
            link->ns += to - from;
            link->exposed_ns += overlap(from, to, wait, ready);
            from = to;
        }
    }
}

uint32_t ms_link_costs_links(const ms_link_costs *costs) { return costs ? costs->links : 0; }

/* Bytes and times may be of different passes: bytes are known when work is enqueued, times when it
 * has run. */
ms_link_stats ms_link_costs_stats(const ms_link_costs *costs, uint32_t link, bool of_step)
{
    if (!costs || link > costs->links) return (ms_link_stats){ 0 };
    ms_link_stats stats = of_step ? costs->step_counts[link] : costs->counts[link];
    stats.ns = costs->times[link].ns;
    stats.exposed_ns = costs->times[link].exposed_ns;
    return stats;
}
