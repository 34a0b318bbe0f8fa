-- The interface that optimizers, planners and join use of a model whose gradients are reduced
-- bucket by bucket. The states of ddp and of fsdp models are such sources.

--- Reduces gradients. Positions count from 1 in the source's list of trained parameters, indices of
--- buckets from 0.
---@class ms.Reducer
---@field stats fun(self): ms.ReducerStats of the last pass that has ended; never waits
---@field layout fun(self): integer, integer how often buckets were made, and how many passes with
---the present ones were reduced; the same on all ranks
---@field bucket_times fun(self): ms.BucketTimes[] in order of index
---@field await_times fun(self) before a forward; **blocks** until the pass before the last ended
---@field is_used fun(self, position: integer): boolean, boolean whether a parameter is used in this
---pass; by any rank if the second value is true, else by this rank
---@field on_reduced fun(self, f: fun(index: integer, positions: integer[]), g?: fun()) f is called
---for each bucket of a backward once its reduction is enqueued, g after the last; both as hooks
---@field divisor fun(self, ranks: integer) number of ranks that the next means are over
---@field buckets fun(self): { index: integer, bytes: integer, parameters: integer }[], integer
---@field link_stats fun(self): table[] what each link of the chain costs; empty: it has one
---@field step_end fun(self) a step has ended

---@class ms.ReducerStats
---@field iterations integer number of passes that were reduced
---@field forward_ms number
---@field backward_ms number
---@field reduce_ms number
---@field exposed_ms number
---@field step_ms number
---@field calls integer
---@field payload_bytes integer
---@field wire_bytes integer
---@field between_hosts_bytes integer
---@field rebuilt boolean whether buckets follow the order of gradients
---@field error? string of the last pass that failed

---@class ms.BucketTimes
---@field index integer
---@field bytes integer
---@field positions integer[]
---@field ready_ms? number when its last gradient was complete, since forward's end; nil: not known
---@field reduce_ms? number

---@class ms.GradientSource
---@field group ms.Group over whose ranks gradients are averaged
---@field reducer? ms.Reducer nil: the model was unwrapped
---@field trained ms.Parameter[] by position
---@field left_out ms.Parameter[] the model's other parameters that require gradients
---@field uses_all boolean every parameter of a bucket that is reduced gets a gradient; a ddp
---model reduces all buckets in every pass
---@field adds_up? boolean buckets may be left out, and what the chain returns is added to gradients
---of earlier passes: links cannot step on it
---@field partial? boolean this pass is not the last of an accumulation: it may reduce, but nothing
---steps
---@field how table the compiled chain: { chain?, accounts?, links?, hook?, name?, whole?, guards? }
---@field hook_name string
---@field in_force table the options in force, defaults included, as stats shows them
---@field counted ms.Counted
---@field whole? string text for messages: what needs all gradients before the first step
---@field guards? ms.State[] of links that check gradients for inf and nan
---@field joining? ms.Joining join runs
---@field shadow? boolean this rank has no inputs left, and takes part in a pass with zeros
---@field overlap ms.OverlapState

--- The state of overlap for a source.
---@class ms.OverlapState
---@field entries ms.OverlapEntry[] the optimizers that it steps
---@field position_of table<ms.Parameter, integer>
---@field stepped table<ms.Parameter, boolean> parameters with optimizers of their own that were
---stepped after this forward
---@field unstepped integer[] positions of those that wait until it is known who uses them
---@field postponed { optimizer: ms.Optimizer, items: table[] }[] steps of then_optimizer that wait
---@field listens boolean the reducer calls for each bucket

--- An optimizer that is stepped in the chain (link) or by a plan (planner).
---@class ms.OverlapEntry
---@field optimizer ms.Optimizer
---@field link? ms.Link
---@field planner? ms.Overlap
---@field chosen table<integer, string> moment by bucket index
---@field pass? integer number of passes since it was attached
---@field next? integer pass of the next plan
---@field layout? integer number of the buckets that the plan is for
---@field version? integer of the planner's file, that made the plan
---@field whole? string as the source's
---@field norm? boolean clip_grad_norm was called
---@field flag? boolean step() was given only_if

local source = {}

--- Whether a parameter is used in this pass: true or false if it is known whether any rank uses it;
--- nil if this rank does not use it and another rank may. by_all: for decisions that all ranks must
--- make equally; then nil also if only this rank knows.
---@param s ms.GradientSource
---@param at integer position
---@param by_all? boolean
---@return boolean?
function source.is_used(s, at, by_all)
  if s.uses_all then return true end
  local used, known = s.reducer:is_used(at)
  if known or used and not by_all then return used end
  return nil
end

--- The new ms.OverlapState of a source.
---@param s ms.GradientSource
---@return ms.OverlapState
function source.overlap_state(s)
  local position_of = {}
  for at, p in ipairs(s.trained) do position_of[p] = at end
  return {
    entries = {}, position_of = position_of, stepped = {}, unstepped = {}, postponed = {},
    listens = false,
  }
end

--- Resets the state at the beginning of a forward: no parameter has been stepped after it, and none
--- waits.
---@param s ms.GradientSource
function source.begin_pass(s)
  s.overlap.stepped, s.overlap.unstepped, s.overlap.postponed = {}, {}, {}
end

return source
