/* dtype.c: the names and sizes of dtypes. */
#include "moonshard/tensor.h"

#include <string.h>

/* Names as scripts, checkpoints and messages write them; bytes of an element. A name cannot be
 * changed once scripts use it. */
static const struct {
    const char *name;
    uint8_t bytes;
} dtypes[MS_DTYPES] = {
    [MS_F32] = { "f32", 4 }, [MS_F16] = { "f16", 2 },   [MS_BF16] = { "bf16", 2 },
    [MS_I64] = { "i64", 8 }, [MS_I32] = { "i32", 4 },   [MS_U16] = { "u16", 2 },
    [MS_U8] = { "u8", 1 },   [MS_BOOL] = { "bool", 1 },
};

/* A dtype comes from the enumeration and is not checked here; the numbers from scripts are checked
 * by those who read them (cast_forward). */
size_t ms_dtype_bytes(ms_dtype dtype) { return dtypes[dtype].bytes; }
const char *ms_dtype_name(ms_dtype dtype) { return dtypes[dtype].name; }

/* False for an unknown name; the caller writes the message, as it knows where the name stood. */
bool ms_dtype_find(const char *name, ms_dtype *out)
{
    for (ms_dtype dtype = 0; dtype < MS_DTYPES; dtype++)
        if (strcmp(name, dtypes[dtype].name) == 0) {
            *out = dtype;
            return true;
        }
    return false;
}
