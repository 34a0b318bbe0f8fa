/* alphabet.c: the characters by which byte-level vocabularies write bytes. */
#include "text/alphabet.h"

/* Bytes that are printable in Latin-1 represent themselves. */
static bool is_itself(uint32_t code)
{
    return (code >= 0x21 && code <= 0x7e) || (code >= 0xa1 && code <= 0xac)
           || (code >= 0xae && code <= 0xff);
}

/* The others follow from U+0100 on, in their order: 00 to 20, 7f to a0, ad. */
static uint32_t character_of(uint8_t byte)
{
    if (is_itself(byte)) return byte;
    if (byte <= 0x20) return 0x100u + byte;
    if (byte <= 0xa0) return 0x121u + (byte - 0x7fu);
    return 0x143;
}

/* The byte of a character, or -1. */
static int byte_of(uint32_t code)
{
    if (is_itself(code)) return (int)code;
    if (code >= 0x100 && code <= 0x120) return (int)code - 0x100;
    if (code >= 0x121 && code <= 0x142) return (int)code - 0x121 + 0x7f;
    return code == 0x143 ? 0xad : -1;
}

ms_status ms_alphabet_write(ms_context *context, ms_span bytes, ms_buffer *out)
{
    /* Each character has one or two bytes. */
    ms_status status = ms_buffer_reserve(context, out, 2 * ms_span_bytes(bytes));
    if (status) return status;
    for (const uint8_t *at = bytes.at; at < bytes.end; at++) {
        uint8_t character[4];
        uint32_t length = ms_utf8_write(character_of(*at), character);
        memcpy(out->data + out->length, character, length);
        out->length += length;
    }
    return MS_OK;
}

ms_status ms_alphabet_read(ms_context *context, ms_span characters, ms_buffer *out, bool *known)
{
    size_t length = out->length;
    ms_status status = ms_buffer_reserve(context, out, ms_span_bytes(characters));
    *known = false;
    for (const uint8_t *at = characters.at; !status && at < characters.end;) {
        uint32_t code = 0, bytes = ms_utf8_character(at, characters.end, &code);
        int byte = bytes ? byte_of(code) : -1;
        if (byte < 0) {
            out->length = length;
            return MS_OK;
        }
        out->data[out->length++] = (uint8_t)byte;
        at += bytes;
    }
    *known = !status;
    return status;
}
