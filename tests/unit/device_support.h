/* device_support.h: streams, storages and marks for tests of devices; each call succeeds. */
#ifndef MOONSHARD_TESTS_DEVICE_SUPPORT_H
#define MOONSHARD_TESTS_DEVICE_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "moonshard/exec.h"

static inline ms_stream *side_of(ms_engine *engine)
{
    ms_stream *stream = NULL;
    assert_int_equal(ms_engine_stream(engine, "side", &stream), MS_OK);
    return stream;
}

static inline ms_storage *storage_of(ms_stream *stream, size_t bytes)
{
    ms_storage *storage = NULL;
    assert_int_equal(ms_storage_new(stream, bytes, &storage), MS_OK);
    return storage;
}

static inline ms_marks *marks_of(ms_engine *engine, uint32_t count)
{
    ms_marks *marks = NULL;
    assert_int_equal(ms_marks_new(engine, count, &marks), MS_OK);
    return marks;
}

#endif
