-- A bucket plan that differs at each planning, for loops.lua and ddp_graph.lua: buckets of one to
-- three parameters, in reverse order.
return function(view)
  local plan, at = {}, 1
  while at <= #view.parameters do
    local length = math.min(1 + (at + view.step) % 3, #view.parameters - at + 1)
    plan[#plan + 1] = {}
    for i = at, at + length - 1 do table.insert(plan[#plan], 1, i) end
    at = at + length
  end
  return plan
end
