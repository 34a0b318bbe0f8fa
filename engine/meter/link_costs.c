/* link_costs.c: what each link of a chain costs, in bytes and in time. */
#include "meter/link_costs.h"

/* Time marks of a bucket: links that wrap work twice. A link beyond the limit is counted with the
 * link before it. */
enum { MOST_LINKS = 32, MARKS_PER_LINK = 2 };

/* The accounts of one chain. The arrays follow the record in the same allocation. A link wraps work
 * twice if it encodes and decodes, hence two marks for each. */
struct ms_accounts {
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
ms_traffic ms_accounts_traffic(const ms_engine *engine)
{
    ms_traffic sum = ms_comm_traffic(engine, MS_COLLECTIVES);
    sum.calls = 0;
    return sum;
}

/* Two sets of marks for each bucket: one is written while the other may still be read. */
ms_status ms_accounts_new(ms_group *group, uint32_t buckets, uint32_t links, ms_accounts **out)
{
    ms_engine *engine = ms_group_engine(group);
    void *memory = NULL;
    if (links < 2) return MS_OK;
    if (links > MOST_LINKS) links = MOST_LINKS;
    /* One owner more than marks, and one count of marks, for each bucket of each set. */
    size_t marks = MARKS_PER_LINK * links, bytes = 2 * buckets * (marks + 2);
    ms_status status = ms_allocate(ms_engine_context(engine), sizeof(ms_accounts) + bytes,
                                   "a chain's accounts", &memory);
    if (status) return status;
    ms_accounts *accounts = memory;
    accounts->engine = engine;
    accounts->buckets = buckets;
    accounts->links = links;
    accounts->most_marks = (uint32_t)marks;
    accounts->owners = (uint8_t *)(accounts + 1);
    accounts->used = accounts->owners + 2 * buckets * (marks + 1);
    status = ms_marks_new(engine, (uint32_t)(2 * buckets * marks), &accounts->marks);
    if (status) {
        ms_accounts_free(accounts);
        return status;
    }
    *out = accounts;
    return MS_OK;
}

/* The marks' memory stays with the engine until the streams have passed them. */
void ms_accounts_free(ms_accounts *accounts)
{
    if (!accounts) return;
    ms_marks_free(accounts->marks);
    ms_release(ms_engine_context(accounts->engine), accounts);
}

/* Index of a bucket's marks in one of the two sets. */
static size_t place_of(const ms_accounts *accounts, uint32_t set, uint32_t bucket)
{
    return (size_t)set * accounts->buckets + bucket;
}

/* The first mark of the bucket at that place. */
static uint32_t marks_at(const ms_accounts *accounts, size_t place)
{
    return (uint32_t)place * accounts->most_marks;
}

/* One more owner than marks: the last one is charged from the last mark to the reduction's end. */
static uint8_t *owners_at(const ms_accounts *accounts, size_t place)
{
    return accounts->owners + place * (accounts->most_marks + 1);
}

/* Charges the bytes since the present link began to it. */
static void charge_traffic(ms_accounts *accounts)
{
    ms_traffic now = ms_accounts_traffic(accounts->engine);
    ms_link_stats *link = &accounts->counts[accounts->owner];
    link->payload_bytes += now.payload_bytes - accounts->traffic.payload_bytes;
    link->wire_bytes += now.wire_bytes - accounts->traffic.wire_bytes;
    link->between_hosts_bytes += now.between_hosts_bytes - accounts->traffic.between_hosts_bytes;
    accounts->traffic = now;
}

/* What ms_bucket_account calls: from now on `link` works. A mark is needed only where something was
 * enqueued since the last one. Work on another stream than the communication stream gets no mark,
 * and its time is not charged. */
static ms_status account(void *user, uint32_t link)
{
    ms_accounts *accounts = user;
    uint8_t *used = &accounts->used[accounts->place];
    ms_stream *stream = ms_engine_current(accounts->engine);
    ms_point now = ms_stream_last(stream);
    ms_status status = MS_OK;
    /* A link beyond the limit is counted with the last one. */
    if (link > accounts->links) link = accounts->links;
    if (link == accounts->owner) return MS_OK;
    charge_traffic(accounts);
    if (now.stream == accounts->last.stream && now.seq != accounts->last.seq
        && *used < accounts->most_marks) {
        status = ms_marks_set(accounts->marks, marks_at(accounts, accounts->place) + *used, stream);
        ++*used;
        accounts->last = ms_stream_last(stream);
    }
    if (now.stream == accounts->last.stream)
        owners_at(accounts, accounts->place)[*used] = (uint8_t)link;
    accounts->owner = link;
    /* A link that encodes and decodes counts once for a bucket. */
    if (!(accounts->seen >> link & 1)) accounts->counts[link].calls++;
    accounts->seen |= (uint64_t)1 << link;
    return status;
}

/* Work before the first call of `account` is charged to no link. bit 0 of `seen` stands for "no
 * link", which counts no calls. The first bucket starts the counts of a pass. */
void ms_accounts_begin(ms_accounts *accounts, ms_bucket *bucket, uint32_t set)
{
    if (!accounts) return;
    if (bucket->index == 0)
        for (uint32_t i = 0; i <= accounts->links; i++) accounts->counts[i] = (ms_link_stats){ 0 };
    accounts->place = place_of(accounts, set, bucket->place);
    accounts->owner = 0;
    accounts->used[accounts->place] = owners_at(accounts, accounts->place)[0] = 0;
    accounts->seen = 1;
    accounts->last = ms_stream_last(ms_engine_current(accounts->engine));
    accounts->traffic = ms_accounts_traffic(accounts->engine);
    bucket->account = account;
    bucket->account_user = accounts;
}

/* The last link is charged up to here. The pointer is cleared first: nothing that follows belongs
 * to this bucket. */
ms_status ms_accounts_end(ms_accounts *accounts, ms_bucket *bucket)
{
    if (!accounts) return MS_OK;
    bucket->account = NULL;
    return account(accounts, 0);
}

/* Gradients may be reduced again before the step ends; its counts are those of the last pass. */
void ms_accounts_step_end(ms_accounts *accounts)
{
    for (uint32_t i = 0; accounts && i <= accounts->links; i++)
        accounts->step_counts[i] = accounts->counts[i];
}

/* How much of a .. b lies in from .. to. */
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
void ms_accounts_harvest(ms_accounts *accounts, uint32_t set, const bool *reduced,
                         const ms_span *spans, uint64_t wait, uint64_t ready)
{
    if (!accounts) return;
    for (uint32_t i = 0; i <= accounts->links; i++) accounts->times[i] = (ms_link_stats){ 0 };
    for (uint32_t b = 0; b < accounts->buckets; b++) {
        if (!reduced[b]) continue;
        size_t place = place_of(accounts, set, b);
        uint64_t from = spans[b].begin, to;
        for (uint32_t k = 0; k <= accounts->used[place]; k++) {
            to = spans[b].end;
            if (k < accounts->used[place])
                ms_marks_time(accounts->marks, marks_at(accounts, place) + k, &to);
            ms_link_stats *link = &accounts->times[owners_at(accounts, place)[k]];
            link->ns += to - from;
            link->exposed_ns += overlap(from, to, wait, ready);
            from = to;
        }
    }
}

uint32_t ms_accounts_links(const ms_accounts *accounts) { return accounts ? accounts->links : 0; }

/* Bytes and times may be of different passes: bytes are known when work is enqueued, times when it
 * has run. */
ms_link_stats ms_accounts_stats(const ms_accounts *accounts, uint32_t link, bool of_step)
{
    if (!accounts || link > accounts->links) return (ms_link_stats){ 0 };
    ms_link_stats stats = of_step ? accounts->step_counts[link] : accounts->counts[link];
    stats.ns = accounts->times[link].ns;
    stats.exposed_ns = accounts->times[link].exposed_ns;
    return stats;
}
