/* wire.h: protocol buffers as they are stored: fields with a number, of four kinds
 * (protobuf.dev/programming-guides/encoding). */
#ifndef MOONSHARD_TEXT_WIRE_H
#define MOONSHARD_TEXT_WIRE_H

#include "text/utf8.h"

typedef enum ms_wire_kind {
    MS_WIRE_VARINT = 0,
    MS_WIRE_64 = 1,
    MS_WIRE_BYTES = 2,
    MS_WIRE_32 = 5
} ms_wire_kind;

typedef struct ms_wire_field {
    uint32_t number;
    ms_wire_kind kind;
    uint64_t value; /* of all kinds but bytes */
    ms_span bytes;
} ms_wire_field;

/* Takes the next field from the message. false at its end, and for what is no message: then
 * message->at is not at its end. */
bool ms_wire_next(ms_span *message, ms_wire_field *out);
/* A float of kind MS_WIRE_32. */
float ms_wire_float(const ms_wire_field *field);

#endif
