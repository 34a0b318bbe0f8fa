/* accounts.c: what each link of a chain costs: bytes as they are enqueued, and time from marks on
 * the communication stream where one link's work ends and another's begins. Marks are times as
 * those of times.c, and lie in two sets that are used in turn. */
#include "ddp/reducer.h"

/* Time marks of a bucket. A link beyond the limit is counted with the link before it. */
enum { MOST_LINKS = 32, SPOTS = 2 };

struct ms_accounts {
    uint32_t links, spots;
    ms_storage *marks;
    /* Two sets, for each bucket: the link that the time before each mark, and after the last
     * one, belongs to; the number of marks. */
    uint8_t *owners, *used;
    /* Index 0: not charged to any link. */
    ms_link_stats counts[MOST_LINKS + 1], step_counts[MOST_LINKS + 1], times[MOST_LINKS + 1];
    /* the bucket that runs */
    uint32_t owner, bucket;
    uint64_t seen; /* bit for each link that had a part in it */
    ms_point last;
    ms_traffic traffic;
};

ms_status ms_accounts_open(ms_reducer *reducer, uint32_t links)
{
    ms_context *context = ms_engine_context(reducer->engine);
    ms_stream *communication = NULL;
    void *memory = NULL;
    if (links < 2) return MS_OK;
    if (links > MOST_LINKS) links = MOST_LINKS;
    size_t spots = SPOTS * links, bytes = 2 * reducer->count * (spots + 2);
    ms_status status =
        ms_allocate(context, sizeof(ms_accounts) + bytes, "a chain's accounts", &memory);
    if (status) return status;
    ms_accounts *accounts = reducer->accounts = memory;
    accounts->links = links;
    accounts->spots = (uint32_t)spots;
    accounts->owners = (uint8_t *)(accounts + 1);
    accounts->used = accounts->owners + 2 * reducer->count * (spots + 1);
    status = ms_group_stream(reducer->group, 1, &communication);
    return status ? status
                  : ms_storage_new(communication, 2 * reducer->count * spots * sizeof(uint64_t),
                                   &accounts->marks);
}

void ms_accounts_close(ms_reducer *reducer)
{
    if (reducer->accounts) ms_storage_release(reducer->accounts->marks);
    ms_release(ms_engine_context(reducer->engine), reducer->accounts);
    reducer->accounts = NULL;
}

static size_t place(const ms_reducer *reducer, uint32_t set, uint32_t bucket)
{
    return (size_t)set * reducer->count + bucket;
}
static uint8_t *owners_of(const ms_reducer *reducer, size_t at)
{
    return reducer->accounts->owners + at * (reducer->accounts->spots + 1);
}

/* Bytes since the link before began are that link's. */
static void close_traffic(ms_reducer *reducer)
{
    ms_accounts *accounts = reducer->accounts;
    ms_traffic now = ms_times_traffic(reducer);
    accounts->counts[accounts->owner].payload_bytes +=
        now.payload_bytes - accounts->traffic.payload_bytes;
    accounts->counts[accounts->owner].wire_bytes += now.wire_bytes - accounts->traffic.wire_bytes;
    accounts->traffic = now;
}

/* What ms_bucket_account calls. Nothing enqueued since the last mark: no mark is needed; on another
 * stream than the communication stream there is none. */
static ms_status account(void *user, uint32_t link)
{
    ms_reducer *reducer = user;
    ms_accounts *accounts = reducer->accounts;
    size_t at = place(reducer, reducer->iterations % 2, accounts->bucket);
    ms_stream *stream = ms_engine_current(reducer->engine);
    ms_point now = ms_stream_last(stream);
    ms_status status = MS_OK;
    if (link > accounts->links) link = accounts->links;
    if (link == accounts->owner) return MS_OK;
    close_traffic(reducer);
    if (now.stream == accounts->last.stream && now.seq != accounts->last.seq
        && accounts->used[at] < accounts->spots) {
        status = ms_times_write(reducer, accounts->marks, at * accounts->spots + accounts->used[at],
                                NULL);
        accounts->used[at]++;
        accounts->last = ms_stream_last(stream);
    }
    if (now.stream == accounts->last.stream)
        owners_of(reducer, at)[accounts->used[at]] = (uint8_t)link;
    accounts->owner = link;
    if (!(accounts->seen >> link & 1)) accounts->counts[link].calls++;
    accounts->seen |= (uint64_t)1 << link;
    return status;
}

void ms_accounts_begin(ms_reducer *reducer, uint32_t bucket)
{
    ms_accounts *accounts = reducer->accounts;
    if (!accounts) return;
    ms_bucket *running = &reducer->buckets.items[bucket].bucket;
    size_t at = place(reducer, reducer->iterations % 2, bucket);
    if (bucket == 0)
        for (uint32_t i = 0; i <= accounts->links; i++) accounts->counts[i] = (ms_link_stats){ 0 };
    accounts->bucket = bucket;
    accounts->owner = accounts->used[at] = owners_of(reducer, at)[0] = 0;
    accounts->seen = 1;
    accounts->last = ms_stream_last(ms_engine_current(reducer->engine));
    accounts->traffic = ms_times_traffic(reducer);
    running->account = account;
    running->account_user = reducer;
}

ms_status ms_accounts_end(ms_reducer *reducer, uint32_t bucket)
{
    if (!reducer->accounts) return MS_OK;
    reducer->buckets.items[bucket].bucket.account = NULL;
    return account(reducer, 0);
}

void ms_accounts_step_end(ms_reducer *reducer)
{
    for (uint32_t i = 0; reducer->accounts && i <= reducer->accounts->links; i++)
        reducer->accounts->step_counts[i] = reducer->accounts->counts[i];
}

static uint64_t overlap(uint64_t a, uint64_t b, uint64_t from, uint64_t to)
{
    uint64_t begin = a > from ? a : from;
    uint64_t end = b < to ? b : to;
    return end > begin ? end - begin : 0;
}

void ms_accounts_harvest(ms_reducer *reducer, uint32_t set, const uint64_t *spans, uint64_t wait,
                         uint64_t ready)
{
    ms_accounts *accounts = reducer->accounts;
    if (!accounts) return;
    for (uint32_t i = 0; i <= accounts->links; i++) accounts->times[i] = (ms_link_stats){ 0 };
    for (uint32_t b = 0; b < reducer->times[set].buckets; b++) {
        size_t at = place(reducer, set, b);
        const uint64_t *marks =
            (const uint64_t *)ms_storage_data(accounts->marks) + at * accounts->spots;
        uint64_t from = spans[2 * b];
        for (uint32_t k = 0; k <= accounts->used[at]; k++) {
            uint64_t to = k < accounts->used[at] ? marks[k] : spans[2 * b + 1];
            ms_link_stats *link = &accounts->times[owners_of(reducer, at)[k]];
            link->ns += to - from;
            link->exposed_ns += overlap(from, to, wait, ready);
            from = to;
        }
    }
}

uint32_t ms_reducer_links(const ms_reducer *reducer)
{
    return reducer->accounts ? reducer->accounts->links : 0;
}

ms_link_stats ms_reducer_link_stats(const ms_reducer *reducer, uint32_t link)
{
    const ms_accounts *accounts = reducer->accounts;
    if (!accounts || link > accounts->links) return (ms_link_stats){ 0 };
    ms_link_stats stats = reducer->has_steps ? accounts->step_counts[link] : accounts->counts[link];
    stats.ns = accounts->times[link].ns;
    stats.exposed_ns = accounts->times[link].exposed_ns;
    return stats;
}
