-- recipes/mnist.lua learns digits. Those of MNIST are not here: the test draws digits of seven
-- segments, each moved by a few pixels, on noise.
local command = require "command"

-- Segments of each digit: top, middle, bottom, upper left, upper right, lower left, lower right.
local SEGMENTS <const> = {
  [0] = "1011111", "0000101", "1110110", "1110101", "0101101", "1111001", "1111011", "1000101",
  "1111111", "1111101",
}
local SIDE <const>, COUNT <const> = 28, 1000

local state = 1
local function draw(limit)
  state = (state * 1103515245 + 12345) & 0x7fffffff
  return (state >> 12) % limit
end

local function picture(digit)
  local rows, top, left = {}, 6 + draw(5), 8 + draw(5)
  for i = 1, SIDE * SIDE do rows[i] = string.char(draw(60)) end
  local function line(segment, y, x, down, across)
    if SEGMENTS[digit]:sub(segment, segment) == "0" then return end
    for i = 0, 5 do
      for thick = 0, 1 do
        local row = top + y + i * down + thick * across
        local column = left + x + i * across + thick * down
        rows[row * SIDE + column + 1] = string.char(160 + draw(90))
      end
    end
  end
  for i = 1, 3 do line(i, (i - 1) * 6, 1, 0, 1) end
  line(4, 1, 0, 1, 0)
  line(5, 1, 6, 1, 0)
  line(6, 7, 0, 1, 0)
  line(7, 7, 6, 1, 0)
  return table.concat(rows)
end

-- Chance is 10%.
it("recipes/mnist.lua learns digits in a few hundred steps", function()
  local folder, pictures, labels = command.folder(), {}, {}
  for i = 1, COUNT do
    labels[i] = string.char(i % 10)
    pictures[i] = picture(i % 10)
  end
  command.write(folder .. "/images-idx3-ubyte",
    "\0\0\8\3" .. (">I4I4I4"):pack(COUNT, SIDE, SIDE) .. table.concat(pictures))
  command.write(folder .. "/labels-idx1-ubyte",
    "\0\0\8\1" .. (">I4"):pack(COUNT) .. table.concat(labels))
  local out = command.succeed(folder, ("run '%s/recipes/mnist.lua' data=. run=out steps=200 \z
    batch=50 channels=8 hidden=64"):format(command.source))
  local accuracy = tonumber(out:match "accuracy on held%-out digits ([%d.]+)%%")
  assert.is_true(accuracy > 90, out)
  command.remove(folder)
end)
