-- Knots of a graph of files, for the lints: files that all reach each other.

local knots = {}

function knots.sorted_keys(set)
  local keys = {}
  for key in pairs(set) do keys[#keys + 1] = key end
  table.sort(keys)
  return keys
end

-- The strongly connected components of more than one file, by Tarjan's algorithm. The graph is
-- file -> { other file -> anything }, and each of the other files is a key of it, too.
function knots.of(graph)
  local index, low, stack, on_stack, found, count = {}, {}, {}, {}, {}, 0
  local function visit(file)
    count = count + 1
    index[file], low[file] = count, count
    stack[#stack + 1], on_stack[file] = file, true
    for _, other in ipairs(knots.sorted_keys(graph[file])) do
      if not index[other] then
        visit(other)
        low[file] = math.min(low[file], low[other])
      elseif on_stack[other] then
        low[file] = math.min(low[file], index[other])
      end
    end
    if low[file] ~= index[file] then return end
    local knot = {}
    repeat
      local member = table.remove(stack)
      on_stack[member] = nil
      knot[#knot + 1] = member
    until member == file
    table.sort(knot)
    if #knot > 1 then found[#found + 1] = knot end
  end
  for _, file in ipairs(knots.sorted_keys(graph)) do
    if not index[file] then visit(file) end
  end
  return found
end

-- Prints each file of a knot, and why it needs the others: form has places for the file, the other
-- file and what the graph has for the two.
function knots.print(graph, knot, form)
  local inside = {}
  for _, file in ipairs(knot) do inside[file] = true end
  for _, file in ipairs(knot) do
    for _, other in ipairs(knots.sorted_keys(graph[file])) do
      if inside[other] then print("    " .. form:format(file, other, graph[file][other])) end
    end
  end
end

return knots
