/* wire.c: protocol buffers as they are stored. */
#include "text/wire.h"

#include "moonshard/base.h"

/* Seven bits in each byte, the lowest first; the highest bit says that another byte follows. */
static bool read_varint(ms_span *message, uint64_t *out)
{
    uint64_t value = 0;
    const uint8_t *at = message->at;
    for (uint32_t shift = 0; shift < 64 && at < message->end; shift += 7) {
        uint8_t byte = *at++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte & 0x80) continue;
        message->at = at;
        *out = value;
        return true;
    }
    return false;
}

/* Little-endian. */
static bool read_fixed(ms_span *message, size_t bytes, uint64_t *out)
{
    if (ms_span_bytes(*message) < bytes) return false;
    *out = 0;
    for (size_t i = bytes; i > 0; i--) *out = *out << 8 | message->at[i - 1];
    message->at += bytes;
    return true;
}

static bool read_value(ms_span *message, ms_wire_field *field)
{
    switch (field->kind) {
    case MS_WIRE_VARINT: return read_varint(message, &field->value);
    case MS_WIRE_64: return read_fixed(message, 8, &field->value);
    case MS_WIRE_32: return read_fixed(message, 4, &field->value);
    case MS_WIRE_BYTES:
        if (!read_varint(message, &field->value) || field->value > ms_span_bytes(*message))
            return false;
        field->bytes = (ms_span){ .at = message->at, .end = message->at + field->value };
        message->at = field->bytes.end;
        return true;
    default: return false;
    }
}

bool ms_wire_next(ms_span *message, ms_wire_field *out)
{
    ms_span rest = *message;
    uint64_t key = 0;
    if (rest.at == rest.end || !read_varint(&rest, &key) || key >> 3 == 0 || key >> 3 > UINT32_MAX)
        return false;
    *out = (ms_wire_field){ .number = (uint32_t)(key >> 3), .kind = (ms_wire_kind)(key & 7) };
    if (!read_value(&rest, out)) return false;
    *message = rest;
    return true;
}

float ms_wire_float(const ms_wire_field *field)
{
    return ms_float_from_bits((uint32_t)field->value);
}
