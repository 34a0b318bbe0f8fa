/* parts.h: the check of calls that have a part of a tensor among their inputs. For record.c. */
#ifndef MOONSHARD_GRAD_PARTS_H
#define MOONSHARD_GRAD_PARTS_H

#include "tensor/op.h"

/* Whether the call may have these inputs: MS_ERROR_ARGUMENT names parameter, unit and cure. */
ms_status ms_part_check(const ms_op_call *call);
/* Results that have one element for each of a part are parts of the same. */
void ms_part_pass_on(const ms_op_call *call);

#endif
