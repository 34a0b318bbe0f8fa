/* io_files.c: files that appear as a whole or not at all, folders, locks; each file call failing,
 * each allocation failing. */
#include "io_support.h"

static void check_content(const char *path, const char *expected)
{
    ms_context context;
    void *data = NULL;
    size_t bytes = 0;
    ms_context_init(&context, NULL);
    assert_int_equal(ms_file_read_all(&context, path, 1000, &data, &bytes), MS_OK);
    assert_int_equal(bytes, strlen(expected));
    /* The zero byte after the content is part of the contract. */
    assert_string_equal(data, expected);
    ms_release(&context, data);
}

static void test_a_file_is_written_and_replaced(void **state)
{
    (void)state;
    ms_context context;
    ms_context_init(&context, NULL);
    const char *path = in_folder("file");
    assert_int_equal(ms_file_write_atomic(&context, path, "first", 5), MS_OK);
    check_content(path, "first");
    assert_int_equal(ms_file_write_atomic(&context, path, "", 0), MS_OK);
    check_content(path, "");
    assert_int_equal(count_names(test_folder), 1);
}

static void test_errors_name_file_and_reason(void **state)
{
    (void)state;
    ms_context context;
    void *data = NULL;
    size_t bytes = 7;
    ms_context_init(&context, NULL);
    assert_int_equal(ms_file_read_all(&context, in_folder("none"), 10, &data, &bytes),
                     MS_ERROR_NOT_FOUND);
    assert_non_null(strstr(context.error.message, "/none': No such file"));
    assert_null(data);
    assert_int_equal(bytes, 7);
    put_file(in_folder("long"), "0123456789", 10);
    assert_int_equal(ms_file_read_all(&context, in_folder("long"), 9, &data, &bytes),
                     MS_ERROR_CORRUPT);
    assert_int_equal(ms_file_write_atomic(&context, in_folder("none/file"), "x", 1),
                     MS_ERROR_NOT_FOUND);
    ms_file *file = NULL;
    char buffer[20];
    assert_int_equal(ms_file_open(&context, in_folder("long"), MS_FILE_READ, &file), MS_OK);
    assert_int_equal(ms_file_read(&context, file, "long", buffer, 20, 5), MS_ERROR_CORRUPT);
    assert_non_null(strstr(context.error.message, "'long' ends at byte 10"));
    ms_file_close(&context, file);
}

/* Every call for a file fails in turn: once, with clean-up possible, and from there on, as after a
 * kill. Old or new, never anything else. */
static void test_each_file_call_may_fail(void **state)
{
    (void)state;
    for (int forever = 0; forever < 2; forever++) {
        bool succeeded = false;
        for (long n = 1; !succeeded; n++) {
            fault_files fault;
            ms_context context;
            fault_files_init(&fault);
            ms_context_init(&context, &fault.table);
            const char *path = in_folder("file");
            put_file(path, "old", 3);
            fault.fail_at = n;
            fault.forever = forever;
            ms_status status = ms_file_write_atomic(&context, path, "brand new", 9);
            succeeded = fault.calls < n;
            assert_true(succeeded == (status == MS_OK));
            if (status) {
                assert_true(status == MS_ERROR_IO || status == MS_ERROR_NO_SPACE);
                assert_non_null(strstr(context.error.message, test_folder));
            }
            void *data = NULL;
            size_t bytes = 0;
            ms_context_init(&context, NULL);
            assert_int_equal(ms_file_read_all(&context, path, 100, &data, &bytes), MS_OK);
            assert_true(strcmp(data, "brand new") == 0 || (status && strcmp(data, "old") == 0));
            ms_release(&context, data);
            if (!forever) assert_int_equal(count_names(test_folder), 1);
            assert_true(n < 50);
        }
        folder_teardown(state);
        folder_setup(state);
    }
}

static void test_short_writes_and_reads_are_continued(void **state)
{
    (void)state;
    fault_files fault;
    ms_context context;
    fault_files_init(&fault);
    fault.trickle = true;
    ms_context_init(&context, &fault.table);
    assert_int_equal(ms_file_write_atomic(&context, in_folder("file"), "piece by piece", 14),
                     MS_OK);
    void *data = NULL;
    size_t bytes = 0;
    assert_int_equal(ms_file_read_all(&context, in_folder("file"), 100, &data, &bytes), MS_OK);
    assert_string_equal(data, "piece by piece");
    ms_release(&context, data);
}

/* Records that a full disk cut short leave nothing in front of the next one. */
static void test_a_record_is_appended_as_a_whole_or_not_at_all(void **state)
{
    (void)state;
    for (long n = 1; n <= 3; n++) { /* open, size, write of the second record */
        fault_files fault;
        ms_context context;
        ms_file *file = NULL;
        fault_files_init(&fault);
        ms_context_init(&context, &fault.table);
        put_file(in_folder("log"), "", 0);
        assert_int_equal(
            ms_file_open(&context, in_folder("log"), MS_FILE_WRITE | MS_FILE_APPEND, &file), MS_OK);
        fault.trickle = true;
        assert_int_equal(ms_file_append(&context, file, "log", "first\n", 6), MS_OK);
        fault.trickle = false;
        fault.calls = 1;
        fault.fail_at = n;
        ms_status status = ms_file_append(&context, file, "log", "second\n", 7);
        check_content(in_folder("log"), status ? "first\n" : "first\nsecond\n");
        assert_int_equal(status != MS_OK, n > 1);
        assert_int_equal(ms_file_append(&context, file, "log", "third\n", 6), MS_OK);
        check_content(in_folder("log"), status ? "first\nthird\n" : "first\nsecond\nthird\n");
        ms_file_close(&context, file);
    }
}

static void test_a_failed_sync_is_not_tried_again(void **state)
{
    (void)state;
    fault_files fault;
    ms_context context;
    fault_files_init(&fault);
    ms_context_init(&context, &fault.table);
    fault.fail_at = 3; /* open, write, sync */
    assert_int_not_equal(ms_file_write_atomic(&context, in_folder("file"), "x", 1), MS_OK);
    assert_int_equal(fault.syncs, 1);
    assert_int_equal(count_names(test_folder), 0);
}

static void test_folders(void **state)
{
    (void)state;
    ms_context context;
    ms_names names = { 0 };
    ms_context_init(&context, NULL);
    assert_int_equal(ms_folder_make(&context, in_folder("a/b//c/")), MS_OK);
    assert_int_equal(ms_folder_make(&context, in_folder("a/b/c")), MS_OK);
    put_file(in_folder("a/b/c/2"), "", 0);
    put_file(in_folder("a/b/c/10"), "", 0);
    put_file(in_folder("a/b/c/1"), "", 0);
    assert_int_equal(ms_folder_list(&context, in_folder("a/b/c"), &names), MS_OK);
    assert_int_equal(names.count, 3);
    assert_string_equal(names.items[0], "1");
    assert_string_equal(names.items[1], "10");
    assert_string_equal(names.items[2], "2");
    ms_names_free(&context, &names);
    /* A folder in it is not touched: the call is for folders that we wrote ourselves. */
    assert_int_not_equal(ms_folder_remove(&context, in_folder("a")), MS_OK);
    assert_int_equal(count_names(in_folder("a/b/c")), 3);
    assert_int_equal(ms_folder_remove(&context, in_folder("a/b/c")), MS_OK);
    assert_int_equal(count_names(in_folder("a/b")), 0);
    put_file(in_folder("file"), "", 0);
    assert_int_not_equal(ms_folder_make(&context, in_folder("file/x")), MS_OK);
    assert_int_equal(ms_folder_list(&context, in_folder("none"), &names), MS_ERROR_NOT_FOUND);
}

static void test_a_lock_excludes_and_tells_who_has_it(void **state)
{
    (void)state;
    ms_context context;
    ms_file *first = NULL, *second = NULL;
    char process[32];
    ms_context_init(&context, NULL);
    assert_int_equal(ms_file_lock(&context, in_folder("lock"), &first), MS_OK);
    assert_int_equal(ms_file_lock(&context, in_folder("lock"), &second), MS_ERROR_DENIED);
    assert_null(second);
    snprintf(process, sizeof process, "process %ld ", (long)getpid());
    assert_non_null(strstr(context.error.message, process));
    ms_file_close(&context, first);
    assert_int_equal(ms_file_lock(&context, in_folder("lock"), &second), MS_OK);
    ms_file_close(&context, second);
}

static ms_status use_everything(ms_context *context)
{
    ms_names names = { 0 };
    void *data = NULL;
    size_t bytes = 0;
    ms_file *lock = NULL;
    ms_status status = ms_folder_make(context, in_folder("x/y"));
    if (!status) status = ms_file_write_atomic(context, in_folder("x/y/file"), "text", 4);
    if (!status) status = ms_file_read_all(context, in_folder("x/y/file"), 10, &data, &bytes);
    if (!status) status = ms_folder_list(context, in_folder("x/y"), &names);
    if (!status) status = ms_file_lock(context, in_folder("x/lock"), &lock);
    if (!status) status = ms_folder_rename(context, in_folder("x/y"), in_folder("x/z"));
    if (!status) status = ms_folder_remove(context, in_folder("x/z"));
    ms_names_free(context, &names);
    ms_file_close(context, lock);
    ms_release(context, data);
    return status;
}

static void test_each_allocation_may_fail(void **state)
{
    ms_status status = MS_ERROR_MEMORY;
    for (long n = 1; status; n++) {
        fault_os fault;
        ms_context context;
        fault_os_init(&fault);
        ms_context_init(&context, &fault.table);
        atomic_store(&fault.fail_at, n);
        status = use_everything(&context);
        assert_true(status == MS_OK || status == MS_ERROR_MEMORY);
        assert_int_equal(atomic_load(&fault.live), 0);
        folder_teardown(state);
        folder_setup(state);
        assert_true(n < 200);
    }
}

#define in_new_folder(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_new_folder(test_a_file_is_written_and_replaced),
        in_new_folder(test_errors_name_file_and_reason),
        in_new_folder(test_each_file_call_may_fail),
        in_new_folder(test_short_writes_and_reads_are_continued),
        in_new_folder(test_a_record_is_appended_as_a_whole_or_not_at_all),
        in_new_folder(test_a_failed_sync_is_not_tried_again),
        in_new_folder(test_folders),
        in_new_folder(test_a_lock_excludes_and_tells_who_has_it),
        in_new_folder(test_each_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
