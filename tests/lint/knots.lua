-- Layers with knots of more than four files, for symbols.lua: how many files the largest knot of
-- the layer may have. These numbers only fall: the lint also reports a number that is too high.
return {
  tensor = 7,
}
