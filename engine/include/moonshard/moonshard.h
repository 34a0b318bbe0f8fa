/* moonshard/moonshard.h: everything of the engine, in order of its layers. */
#ifndef MOONSHARD_H
#define MOONSHARD_H
#include "moonshard/base.h"
#include "moonshard/exec.h"
#include "moonshard/cpu_task.h"
#include "moonshard/tensor.h"
#include "moonshard/ops.h"
#include "moonshard/grad.h"
#include "moonshard/control.h"
#include "moonshard/comm.h"
#include "moonshard/tokenizer.h"
#include "moonshard/optim.h"
#include "moonshard/hook.h"
#include "moonshard/ddp.h"
#include "moonshard/fsdp.h"
#include "moonshard/io.h"
#endif
