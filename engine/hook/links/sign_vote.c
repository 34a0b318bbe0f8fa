/* sign_vote.c: each number travels as its sign, one bit; the result is the sign that most ranks
 * have, -1 or 1, and 0 where as many have the one as the other (Bernstein et al. 2019). */
#include "hook/link_ops.h"

#include "hook/links.h"

/* decode_sum adds the ranks' signs, -1 or 1; the sign of the sum is the majority. All ranks decode
 * the same gathered bits and so get the same result. A residual has no meaning here, since the
 * result is not the mean of what was sent; the table of kinds refuses error_feedback before it. */
ms_status ms_sign_vote_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    ms_link_ops w = { .link = link, .bucket = bucket };
    int64_t count = ms_tensor_count(bucket->buffer), numbers = ms_bucket_numbers(bucket);
    const ms_attributes how = {
        .codec = { .codec = { .kind = MS_CODEC_SIGN, .block = 8, .bare = true }, .n = count }
    };
    ms_tensor *x = ms_link_ops_cast(&w, bucket->buffer, MS_F32);
    ms_tensor *bits = ms_link_ops_operator(&w, &ms_op_codec_encode, how, false, &x, 1, NULL);
    ms_tensor *all = ms_link_ops_all_gather(&w, bits);
    ms_tensor *votes = ms_link_ops_operator(&w, &ms_op_codec_decode_sum, how, false, &all, 1, NULL);
    ms_link_ops_change(&w, &ms_op_sign, 0, votes, NULL);
    /* A zero has a sign too; padding stays zero. */
    if (numbers < count)
        ms_link_ops_change(&w, &ms_op_fill, 0,
                           ms_link_ops_view(&w, votes, numbers, count - numbers, 0), NULL);
    return ms_link_ops_give(&w, votes, out);
}
