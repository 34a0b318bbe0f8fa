-- Bytes of one number of each dtype.
return { f32 = 4, f16 = 2, bf16 = 2, i64 = 8, i32 = 4, u16 = 2, u8 = 1, bool = 1 }
