/* topology.c: the members of a group by nodes. */
#include "comm/topology.h"

#include <string.h>

/* Every rank of the group finds the same, but for `here`. Nodes of a job are few, so each is looked
 * for in the list of those that were met. */
void ms_topology_find(ms_topology *at, const uint16_t *node_of, const ms_group *group)
{
    uint16_t numbers[MS_LOCAL_RANKS_MAX];
    memset(at, 0, sizeof *at);
    for (uint32_t m = 0; m < group->size; m++) {
        uint16_t number = node_of[group->members[m]];
        uint32_t h = 0;
        while (h < at->nodes && numbers[h] != number) h++;
        if (h == at->nodes) numbers[at->nodes++] = number;
        at->node[m] = (uint16_t)h;
        at->place[m] = at->first[h + 1]++; /* counts first */
        at->is_here[m] = number == node_of[group->members[group->rank]];
    }
    at->least = group->size;
    for (uint32_t h = 0; h < at->nodes; h++) {
        if (at->first[h + 1] < at->least) at->least = at->first[h + 1];
        at->first[h + 1] = (uint16_t)(at->first[h + 1] + at->first[h]);
    }
    for (uint32_t m = 0; m < group->size; m++)
        at->list[at->first[at->node[m]] + at->place[m]] = (uint16_t)m;
    at->here = at->node[group->rank];
}
