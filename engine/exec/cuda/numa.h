/* numa.h: NUMA nodes of GPUs. */
#ifndef MOONSHARD_EXEC_CUDA_NUMA_H
#define MOONSHARD_EXEC_CUDA_NUMA_H

#include "moonshard/base.h"

/* The node of the device of a place on the PCI bus; -1: not known. */
int32_t ms_cuda_node_of(const ms_os *os, const char *pci);

#endif
