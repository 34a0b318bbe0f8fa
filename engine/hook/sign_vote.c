/* sign_vote.c: each number travels as its sign, one bit; the result is what most ranks say, -1 or
 * 1, and 0 where they are even (Bernstein et al. 2019). */
#include "hook/work.h"

static ms_status reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    ms_work w = { .link = link, .bucket = bucket, .status = ms_link_refuse_feedback(link, bucket) };
    if (!w.status) w.status = ms_link_check_length(link, bucket);
    const ms_attributes how = { .codec = {
                                    .codec = { .kind = MS_CODEC_SIGN, .block = 8, .bare = true },
                                    .n = ms_tensor_count(bucket->buffer) } };
    ms_tensor *x = ms_work_cast(&w, bucket->buffer, MS_F32),
              *bits = ms_work_operator(&w, &ms_op_codec_encode, how, false, &x, 1, NULL);
    ms_tensor *all = ms_work_all_gather(&w, bits),
              *votes = ms_work_operator(&w, &ms_op_codec_decode_sum, how, false, &all, 1, NULL);
    ms_work_change(&w, &ms_op_sign, 0, votes, NULL);
    return ms_work_give(&w, votes, out);
}

const ms_link_kind ms_link_sign_vote = { .name = "sign_vote", .reduce = reduce };
