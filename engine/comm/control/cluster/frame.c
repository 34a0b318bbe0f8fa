/* frame.c: whether the bytes that have come over a connection are a frame. */
#include "comm/control/cluster/frame.h"

/* The least and the most that a body of each kind may have. */
static const struct limits {
    size_t least, most;
} limits[MS_FRAME_KINDS] = {
    [MS_FRAME_HELLO] = { sizeof(ms_hello_body), sizeof(ms_hello_body) },
    [MS_FRAME_REFUSED] = { 1, 512 },
    [MS_FRAME_WRITE] = { sizeof(ms_write_body) + 1, MS_FRAME_BODY_MOST },
    [MS_FRAME_CAUSE] = { sizeof(ms_abort_record), sizeof(ms_abort_record) },
    [MS_FRAME_JOB_END] = { sizeof(ms_abort_record), sizeof(ms_abort_record) },
    [MS_FRAME_REQUEST] = { sizeof(ms_request_body), sizeof(ms_request_body) },
    [MS_FRAME_PREPARE] = { sizeof(ms_request_body), sizeof(ms_request_body) },
    [MS_FRAME_PREPARED] = { sizeof(ms_request_body), sizeof(ms_request_body) },
    [MS_FRAME_DECIDED] = { sizeof(ms_request_body), sizeof(ms_request_body) },
    [MS_FRAME_IDS] = { sizeof(ms_ids_body), sizeof(ms_ids_body) },
    [MS_FRAME_GIVEN] = { sizeof(ms_ids_body), sizeof(ms_ids_body) },
    [MS_FRAME_HANG] = { sizeof(ms_hang_body), sizeof(ms_hang_body) },
    [MS_FRAME_LOOK] = { sizeof(ms_look_body), sizeof(ms_look_body) },
    [MS_FRAME_SEEN] = { sizeof(ms_seen_body), MS_FRAME_BODY_MOST },
    [MS_FRAME_CALL] = { sizeof(ms_call_body), sizeof(ms_call_body) },
    [MS_FRAME_CODE] = { sizeof(ms_code_body), sizeof(ms_code_body) },
    [MS_FRAME_COMING] = { sizeof(ms_coming_body), sizeof(ms_coming_body) },
    [MS_FRAME_EXCHANGE] = { 1, MS_FRAME_BODY_MOST },
    [MS_FRAME_REPORT] = { 1, MS_FRAME_BODY_MOST },
};

/* Kinds without a body are not in the table, so their limits are 0. */
bool ms_frame_check_head(const ms_frame_head *head)
{
    return head->magic == MS_FRAME_MAGIC && head->kind > 0 && head->kind < MS_FRAME_KINDS
           && head->bytes >= limits[head->kind].least && head->bytes <= limits[head->kind].most;
}

/* The texts of an error are fields of fixed size. */
static bool check_record(ms_abort_record *record)
{
    ms_error *error = &record->error;
    error->operation[sizeof error->operation - 1] = '\0';
    error->script[sizeof error->script - 1] = '\0';
    error->message[sizeof error->message - 1] = '\0';
    return record->reason > MS_ABORT_NONE && record->reason <= MS_ABORT_STOPPED;
}

/* The lists after the body fill it exactly. The counts have 32 bits, so the product does not
 * overflow. */
static bool check_seen(const ms_seen_body *seen, size_t bytes)
{
    uint64_t lists = (uint64_t)seen->calls * sizeof(ms_rank_in_call)
                     + (uint64_t)seen->counts * sizeof(ms_call_count);
    ms_rank_in_call *calls = (ms_rank_in_call *)(uintptr_t)(seen + 1);
    if (lists != bytes - sizeof *seen) return false;
    for (uint32_t i = 0; i < seen->calls; i++) {
        ms_flight *call = &calls[i].call;
        call->group_name[sizeof call->group_name - 1] = '\0';
        call->label[sizeof call->label - 1] = '\0';
        call->script[sizeof call->script - 1] = '\0';
    }
    return true;
}

/* Numbers of ranks and nodes are checked by those who use them, since they know how many there are.
 */
bool ms_frame_check_body(const ms_frame_head *head, void *body)
{
    switch (head->kind) {
    case MS_FRAME_HELLO: ((ms_hello_body *)body)->version[15] = '\0'; return true;
    case MS_FRAME_REFUSED: ((char *)body)[head->bytes - 1] = '\0'; return true;
    case MS_FRAME_CAUSE:
    case MS_FRAME_JOB_END: return check_record(body);
    case MS_FRAME_REQUEST:
    case MS_FRAME_PREPARE:
    case MS_FRAME_PREPARED:
    case MS_FRAME_DECIDED: {
        const ms_request_body *request = body;
        return request->kind < MS_REQUESTS && request->value <= 255;
    }
    case MS_FRAME_HANG: ((ms_hang_body *)body)->text[MS_HANG_REPORT_BYTES - 1] = '\0'; return true;
    case MS_FRAME_SEEN: return check_seen(body, head->bytes);
    case MS_FRAME_CALL:
        ((ms_call_body *)body)->version[15] = '\0';
        ((ms_call_body *)body)->node[MS_NODE_NAME_BYTES - 1] = '\0';
        return true;
    case MS_FRAME_CODE: return ((const ms_code_body *)body)->code <= 255;
    default: return true;
    }
}
