-- Shows that accesses.lua reports violations and nothing else: each case is a small build tree of
-- PTX with a table, and the expected report.
--
--     lua5.4 tests/lint/accesses_test.lua

local lint = arg[0]:gsub("accesses_test", "accesses")

local FIRST = "\tst.global.v4.b32 \t[%rd1], {%r1, %r2, %r3, %r4};\n"
local SPLIT = "\tst.global.u32 \t[%rd1], %r1;\n\tst.global.u32 \t[%rd1+4], %r2;\n\z
  \tst.global.u32 \t[%rd1+8], %r3;\n\tst.global.u32 \t[%rd1+12], %r4;\n"
local ONE = "\t@%p1 st.global.u16 \t[%rd2], %rs1;\n"

-- Two kernels as the compiler writes them; `store` stands in the first one.
local function ptx(store, version)
  return ("// Cuda compilation tools, release 13.0, V%s\n.visible .entry gradient(\n\z
    \t.param .u64 gradient_0\n)\n{\n\t.reg .pred \t%%p<2>;\n\n\tld.param.u64 \t%%rd1, [a];\n\z
    \tld.global.nc.v2.f32 \t{%%f1, %%f2}, [%%rd3];\n\tld.shared.u32 \t%%r9, [s];\n\z
    \t// begin inline asm\n%s%s$L__BB0_2:\n\t@!%%p1 bra \t$L__BB0_2;\n\tret;\n\n}\n\z
    \t// .globl\tlittle\n.visible .entry little(\n)\n{\n\tst.u8 \t[%%rd1], %%rs1;\n\tret;\n\n}\n")
    :format(version or "13.0.88", store, ONE)
end
local TABLE = "# kernel\nnvcc 13.0.88\ngradient ld 8:1 st 16:1 2:1 ptx 7\nlittle ld st 1:1 ptx 2\n"

-- A build whose PTX is the text.
local function tree(text, table_text)
  return { ["engine/ops/a.fatbin.ptx"] = text, ["accesses.txt"] = table_text or TABLE }
end

-- name, files (path -> text), what the only line of the report must contain (false: no report)
local cases = {
  { "as known", tree(ptx(FIRST)), false },
  {
    "a split store", tree(ptx(SPLIT)),
    "gradient: 5 stores of less than 16 bytes, 1 are known: is a piece of 16 bytes stored in words",
  },
  { "a split store of another compiler", tree(ptx(SPLIT, "13.1.20")), "gradient: 5 stores" },
  { "halves", tree(ptx((FIRST:gsub("v4", "v2"):gsub(", %%r3, %%r4", "")))), "gradient: 2 stores" },
  { "one more store of each width", tree(ptx(FIRST .. FIRST .. ONE)), "differs in 1 kernels" },
  {
    "an unrolled loop of another compiler", tree(ptx(FIRST .. FIRST .. ONE, "13.1.20")), false,
  },
  { "one more instruction", tree(ptx(FIRST .. "\tadd.s32 \t%r1, %r1, 1;\n")), "ptx 8" },
  {
    "one more instruction of another compiler",
    tree(ptx(FIRST .. "\tadd.s32 \t%r1, %r1, 1;\n", "13.1.20")), false,
  },
  { "a wide store less", tree(ptx "\tmov.u32 \t%r1, 0;\n"), "differs in 1 kernels" },
  { "a generic store", tree(ptx(FIRST:gsub("%.global", "") .. "")), false },
  {
    "narrow as ever", tree(ptx(FIRST, "13.1.20"):gsub("st.u8.-\n", "%0%0%0") .. ""), false,
  },
  { "a new kernel", tree(ptx(FIRST), (TABLE:gsub("little.*", ""))), "new: little ld st 1:1 ptx 2" },
  { "a kernel is gone", tree(ptx(FIRST), TABLE .. "z ld st ptx 1\n"), "gone: z ld st ptx 1" },
  { "no kernels", tree("// nothing\n", "nvcc 13.0.88\n"), "no kernel was found" },
}

dofile((arg[0]:gsub("[^/]*$", "cases.lua")))(lint, cases, "ROOT/accesses.txt")
