/* checkpoint.c: a step's values on disk: copied to host memory, then written as a folder that
 * appears as a whole.
 *
 * Names in a folder of checkpoints: NAME is a committed one; .tmp-NAME is being written or removed;
 * .old-NAME was committed and is being replaced, and counts again if a crash leaves no NAME beside
 * it. */
#include "io/path.h"

#include <stdatomic.h>
#include <string.h>

#include "io/safetensors.h"

#define TEMPORARY ".tmp-"
#define REPLACED ".old-"
#define STEP "step-" /* how the names of checkpoints that scripts save begin */

/* ---------------------------------------------------------------- snapshots */

/* One tensor of a snapshot, which owns name, data and hashes. spec.shape points at `shape`, so an
 * array of copies does not move after it is filled. The hashes are taken with the copy: its bytes
 * are in a cache then, and the manifest is composed before anything is written. */
typedef struct ms_copy {
    char *name;
    void *data;
    size_t bytes;
    uint64_t *hashes;
    int64_t shape[MS_DIMS_MAX];
} ms_copy;

/* Copies of tensors in host memory. The host thread takes them, because only it may use tensors.
 * Writing and freeing need no engine, so another thread can do both while training changes the
 * tensors. A snapshot belongs to one thread at a time. */
struct ms_snapshot {
    ms_context context; /* for releasing, on whichever thread */
    uint32_t count;
    ms_safetensors_spec *specs;
    ms_copy *copies;
};

/* Copies a tensor as number i. Blocks until its values are there. After an error the copy may hold
 * a part of what it owns already; ms_snapshot_free releases that, as count includes it. */
static ms_status snapshot_take(ms_context *context, ms_snapshot *snapshot, uint32_t i,
                               const char *name, ms_tensor *tensor)
{
    ms_copy *copy = &snapshot->copies[i];
    uint32_t dims = ms_tensor_dims(tensor);
    copy->bytes = ms_tensor_bytes(tensor);
    ms_status status = ms_text_join(context, name, "", &copy->name);
    if (!status) status = ms_bytes_new(context, copy->bytes, name, &copy->data);
    if (!status)
        status =
            ms_allocate(context, (1 + ms_safetensors_blocks(copy->bytes)) * sizeof *copy->hashes,
                        "hashes of a tensor", (void **)&copy->hashes);
    if (!status) status = ms_tensor_hash(tensor, copy->data, MS_SAFETENSORS_BLOCK, copy->hashes);
    if (status) return status;
    if (dims) memcpy(copy->shape, ms_tensor_shape(tensor), dims * sizeof(int64_t));
    snapshot->specs[i] = (ms_safetensors_spec){
        .name = copy->name, .dtype = ms_tensor_dtype(tensor), .dims = dims, .shape = copy->shape
    };
    return MS_OK;
}

/* count is set as soon as both tables exist and before they are filled: their items are zero until
 * then, so that ms_snapshot_free can release a snapshot of which only a part was taken. */
ms_status ms_snapshot_new(ms_engine *engine, const char *const *names, ms_tensor *const *tensors,
                          uint32_t count, ms_snapshot **out)
{
    ms_context *context = ms_engine_context(engine);
    ms_snapshot *snapshot = NULL;
    ms_status status = ms_allocate(context, sizeof *snapshot, "a snapshot", (void **)&snapshot);
    if (status) return status;
    ms_context_init(&snapshot->context, context->os);
    status = ms_allocate(context, count * sizeof *snapshot->specs, "a snapshot",
                         (void **)&snapshot->specs);
    if (!status)
        status = ms_allocate(context, count * sizeof *snapshot->copies, "a snapshot",
                             (void **)&snapshot->copies);
    if (!status) snapshot->count = count;
    for (uint32_t i = 0; i < count && !status; i++)
        status = snapshot_take(context, snapshot, i, names[i], tensors[i]);
    if (!status) *out = snapshot;
    else ms_snapshot_free(snapshot);
    return status;
}

const uint64_t *ms_snapshot_hashes(const ms_snapshot *snapshot, uint32_t index)
{
    return snapshot->copies[index].hashes;
}

/* The context is copied out first, because the snapshot that holds it is the last thing
 * released. */
void ms_snapshot_free(ms_snapshot *snapshot)
{
    if (!snapshot) return;
    ms_context context = snapshot->context;
    for (uint32_t i = 0; i < snapshot->count; i++) {
        ms_release(&context, snapshot->copies[i].name);
        ms_release(&context, snapshot->copies[i].data);
        ms_release(&context, snapshot->copies[i].hashes);
    }
    ms_release(&context, snapshot->specs);
    ms_release(&context, snapshot->copies);
    ms_release(&context, snapshot);
}

/* ----------------------------------------------------------- folder of them */

/* folder/<prefix>name, as a text that the caller releases. The prefix tells a checkpoint from one
 * that is being written or replaced. */
static ms_status place(ms_context *context, const char *folder, const char *prefix,
                       const char *name, char **out)
{
    char *whole = NULL;
    ms_status status = ms_text_join(context, prefix, name, &whole);
    if (!status) status = ms_path_join(context, folder, whole, out);
    ms_release(context, whole);
    return status;
}

/* A path that cannot be examined counts as absent. Whatever then uses the path reports the
 * reason. */
static bool is_folder(ms_context *context, const char *path)
{
    ms_file_info info;
    return context->os->info(context->os->user, path, &info) == 0 && info.is_directory;
}

/* A checkpoint that a user has replaced by a link to an archive, or a trap. */
static bool is_link(ms_context *context, const char *path)
{
    ms_file_info info;
    return context->os->info(context->os->user, path, &info) == 0 && info.is_link;
}

/* Whether a name is one that a checkpoint has between begin and commit: the prefix, "step-", and a
 * number. */
static bool is_made_here(const char *name, const char *prefix)
{
    size_t length = strlen(prefix);
    if (strncmp(name, prefix, length) != 0 || strncmp(name + length, STEP, strlen(STEP)) != 0)
        return false;
    const char *number = name + length + strlen(STEP);
    return *number && number[strspn(number, "0123456789")] == 0;
}

/* Undoes what a crash left under one name. A temporary folder was never committed and is removed. A
 * replaced one is removed if the new checkpoint has its name; otherwise the crash came between the
 * two renames of commit(), and the old checkpoint gets its name back. Other names, and files,
 * stay; of a link, the link alone is removed. */
static ms_status sweep_one(ms_context *context, const char *folder, const char *name)
{
    bool temporary = is_made_here(name, TEMPORARY), replaced = is_made_here(name, REPLACED);
    char *path = NULL, *committed = NULL;
    /* Committed checkpoints and other files are none of its business. */
    if (!temporary && !replaced) return MS_OK;
    ms_status status = ms_path_join(context, folder, name, &path);
    if (!status)
        status = ms_path_join(context, folder, name + strlen(replaced ? REPLACED : TEMPORARY),
                              &committed);
    if (!status && is_folder(context, path)) {
        if (replaced && !is_link(context, path) && !is_folder(context, committed))
            status = ms_folder_rename(context, path, committed);
        else status = ms_folder_remove(context, path);
    }
    ms_release(context, path);
    ms_release(context, committed);
    return status;
}

/* No checkpoint of this folder may be written or removed meanwhile: its temporary name would be
 * taken for one that a crash has left. A folder that does not exist yet is swept already. */
ms_status ms_checkpoint_sweep(ms_context *context, const char *folder)
{
    ms_names names = { 0 };
    if (!is_folder(context, folder)) return MS_OK;
    ms_status status = ms_folder_list(context, folder, &names);
    for (size_t i = 0; i < names.count && !status; i++)
        status = sweep_one(context, folder, names.items[i]);
    ms_names_free(context, &names);
    return status;
}

/* Files cannot be removed together with their folder in one step. The rename first takes the name
 * away, so that a crash while files are removed leaves a temporary folder for the next sweep, and
 * not a checkpoint that lacks files. */
ms_status ms_checkpoint_remove(ms_context *context, const char *folder, const char *name)
{
    char *path = NULL, *temporary = NULL;
    ms_status status = place(context, folder, "", name, &path);
    if (!status) status = place(context, folder, TEMPORARY, name, &temporary);
    if (!status) status = ms_folder_rename(context, path, temporary);
    if (!status) status = ms_folder_remove(context, temporary);
    ms_release(context, path);
    ms_release(context, temporary);
    return status;
}

/* A checkpoint that is kept for good gets another name this way, without a copy. */
ms_status ms_checkpoint_rename(ms_context *context, const char *folder, const char *name,
                               const char *to)
{
    char *path = NULL, *target = NULL;
    ms_status status = place(context, folder, "", name, &path);
    if (!status) status = place(context, folder, "", to, &target);
    if (!status) status = ms_folder_rename(context, path, target);
    ms_release(context, path);
    ms_release(context, target);
    return status;
}

/* ------------------------------------------------------------------ writing */

/* The writer is freed on every path; without its commit it removes its temporary file. */
static ms_status write_tensors(ms_context *context, const ms_snapshot *snapshot, const char *path)
{
    ms_safetensors_writer *writer = NULL;
    ms_status status =
        ms_safetensors_create(context, path, snapshot->specs, snapshot->count, NULL, 0, &writer);
    for (uint32_t i = 0; i < snapshot->count && !status; i++)
        status =
            ms_safetensors_write(writer, i, snapshot->copies[i].data, snapshot->copies[i].bytes);
    if (!status) status = ms_safetensors_commit(writer);
    ms_safetensors_free(writer);
    return status;
}

/* Fills the temporary folder. Each file is synced by its own commit, and so is the folder that
 * names it: once this succeeds, only the rename of the folder decides whether the checkpoint
 * exists. */
static ms_status write_files(ms_context *context, const ms_snapshot *snapshot, const char *folder,
                             const void *manifest, size_t bytes)
{
    char *tensors = NULL, *text = NULL;
    ms_status status = ms_folder_make(context, folder);
    if (!status) status = ms_path_join(context, folder, MS_CHECKPOINT_TENSORS, &tensors);
    if (!status) status = ms_path_join(context, folder, MS_CHECKPOINT_MANIFEST, &text);
    if (!status) status = write_tensors(context, snapshot, tensors);
    if (!status) status = ms_file_write_atomic(context, text, manifest, bytes);
    ms_release(context, tensors);
    ms_release(context, text);
    return status;
}

/* Gives a complete temporary folder its final name. rename() cannot replace a folder that has
 * files, so an older checkpoint is first renamed to its .old- name, and back if the second rename
 * fails. A crash between the two renames is mended by sweep_one. The old checkpoint is removed only
 * after the parent folder was synced: before that, the new name may not survive a crash. */
static ms_status commit(ms_context *context, const char *temporary, const char *final,
                        const char *replaced)
{
    bool replacing = is_folder(context, final);
    if (replacing) {
        int error = context->os->rename(context->os->user, final, replaced);
        if (error) return ms_fail_os(context, error, "cannot replace", final);
    }
    int error = context->os->rename(context->os->user, temporary, final);
    if (error) {
        /* The old checkpoint counts again at once, not only after the next sweep. */
        if (replacing) (void)context->os->rename(context->os->user, replaced, final);
        return ms_fail_os(context, error, "cannot rename to", final);
    }
    ms_status status = ms_folder_sync_of(context, final);
    return status || !replacing ? status : ms_folder_remove(context, replaced);
}

/* Writes one checkpoint under its temporary name and commits it. The folder has been swept, so that
 * none of the three names is left from a crash. A failure removes the temporary folder; the message
 * is the one of the failure, whatever the removal says. */
static ms_status write_one(ms_context *context, const ms_snapshot *snapshot, const char *folder,
                           const char *name, const void *manifest, size_t bytes)
{
    char *temporary = NULL, *final = NULL, *replaced = NULL;
    ms_context quiet; /* clean-up must not hide the cause */
    ms_context_init(&quiet, context->os);
    ms_status status = place(context, folder, TEMPORARY, name, &temporary);
    if (!status) status = place(context, folder, "", name, &final);
    if (!status) status = place(context, folder, REPLACED, name, &replaced);
    if (status) goto done;
    status = write_files(context, snapshot, temporary, manifest, bytes);
    if (!status) status = commit(context, temporary, final, replaced);
    if (status && is_folder(&quiet, temporary)) (void)ms_folder_remove(&quiet, temporary);
done:
    ms_release(context, temporary);
    ms_release(context, final);
    ms_release(context, replaced);
    return status;
}

/* ------------------------------------------------- written by several processes */

/* The temporary folder is made here and not by the writers, so that a writer that comes late cannot
 * bring back a folder that was discarded. */
ms_status ms_checkpoint_begin(ms_context *context, const char *folder, const char *name)
{
    char *temporary = NULL;
    ms_status status = ms_checkpoint_sweep(context, folder);
    if (!status) status = place(context, folder, TEMPORARY, name, &temporary);
    if (!status) status = ms_folder_make(context, temporary);
    ms_release(context, temporary);
    return status;
}

/* The file is synced, and so is the folder that names it. There is no snapshot: all ranks wait for
 * the commit anyway, and copies of all tensors would double what each needs. */
ms_status ms_checkpoint_write_part(ms_context *context, const char *const *names,
                                   ms_tensor *const *tensors, uint32_t count, const char *folder,
                                   const char *name, const char *file, uint64_t *hashes)
{
    char *temporary = NULL, *path = NULL;
    ms_status status = place(context, folder, TEMPORARY, name, &temporary);
    if (!status) status = ms_path_join(context, temporary, file, &path);
    if (!status)
        status = ms_safetensors_stream(context, path, names, tensors, count, NULL, 0, hashes);
    ms_release(context, temporary);
    ms_release(context, path);
    return status;
}

/* A folder without a manifest is no checkpoint, so the manifest comes last. */
ms_status ms_checkpoint_commit(ms_context *context, const char *folder, const char *name,
                               const void *manifest, size_t bytes)
{
    char *temporary = NULL, *final = NULL, *replaced = NULL, *text = NULL;
    ms_status status = place(context, folder, TEMPORARY, name, &temporary);
    if (!status) status = place(context, folder, "", name, &final);
    if (!status) status = place(context, folder, REPLACED, name, &replaced);
    if (!status) status = ms_path_join(context, temporary, MS_CHECKPOINT_MANIFEST, &text);
    if (!status) status = ms_file_write_atomic(context, text, manifest, bytes);
    if (!status) status = commit(context, temporary, final, replaced);
    ms_release(context, temporary);
    ms_release(context, final);
    ms_release(context, replaced);
    ms_release(context, text);
    return status;
}

/* Nothing to discard is success. */
ms_status ms_checkpoint_discard(ms_context *context, const char *folder, const char *name)
{
    char *temporary = NULL;
    ms_status status = place(context, folder, TEMPORARY, name, &temporary);
    if (!status && is_folder(context, temporary)) status = ms_folder_remove(context, temporary);
    ms_release(context, temporary);
    return status;
}

/* The synchronous form; ms_checkpoint_start is what training uses. */
ms_status ms_checkpoint_write(ms_context *context, const ms_snapshot *snapshot, const char *folder,
                              const char *name, const void *manifest, size_t bytes)
{
    ms_status status = ms_checkpoint_sweep(context, folder);
    return status ? status : write_one(context, snapshot, folder, name, manifest, bytes);
}

/* -------------------------------------------------------------- on a thread */

/* A checkpoint that a thread writes. The job owns copies of everything that the thread reads, and
 * the snapshot. The thread alone writes context.error and status; the host reads them after it has
 * joined the thread, which orders the accesses. `done` only answers ms_checkpoint_is_done, without
 * waiting. */
struct ms_checkpoint_job {
    ms_context context; /* the thread's, until it was joined */
    ms_os_thread *thread;
    ms_snapshot *snapshot;
    char *folder, *name, *manifest;
    size_t bytes;
    ms_status status;
    atomic_bool done;
};

/* The thread's function. Errors stay in the job's own context, since the host uses its context at
 * the same time. */
static void job_run(void *argument)
{
    ms_checkpoint_job *job = argument;
    job->status =
        write_one(&job->context, job->snapshot, job->folder, job->name, job->manifest, job->bytes);
    atomic_store(&job->done, true);
}

/* The thread must have been joined, or never started. */
static void job_free(ms_context *context, ms_checkpoint_job *job)
{
    ms_snapshot_free(job->snapshot);
    ms_release(context, job->folder);
    ms_release(context, job->name);
    ms_release(context, job->manifest);
    ms_release(context, job);
}

/* Copies what the thread needs: the caller's texts may be gone before it ends. */
static ms_status job_fill(ms_context *context, ms_checkpoint_job *job, const char *folder,
                          const char *name, const void *manifest, size_t bytes)
{
    ms_status status = ms_text_join(context, folder, "", &job->folder);
    if (!status) status = ms_text_join(context, name, "", &job->name);
    if (!status) status = ms_bytes_new(context, bytes, "a manifest", (void **)&job->manifest);
    if (status) return status;
    memcpy(job->manifest, manifest, bytes);
    job->bytes = bytes;
    return MS_OK;
}

/* Starts the thread. The job owns the snapshot only if that succeeds. It is put in before the
 * start, as the thread reads it at once, and taken out after a failure, so that job_free leaves it
 * to the caller. */
static ms_status job_begin(ms_context *context, ms_checkpoint_job *job, ms_snapshot *snapshot)
{
    job->snapshot = snapshot;
    int error =
        context->os->thread_start(context->os->user, "ms-checkpoint", job_run, job, &job->thread);
    if (!error) return MS_OK;
    job->snapshot = NULL;
    return ms_fail_os(context, error, "cannot start the thread that writes checkpoints", NULL);
}

/* The snapshot is taken over only with success: after a failure the caller still frees it. */
ms_status ms_checkpoint_start(ms_context *context, ms_snapshot *snapshot, const char *folder,
                              const char *name, const void *manifest, size_t bytes,
                              ms_checkpoint_job **out)
{
    ms_checkpoint_job *job = NULL;
    /* Not on the thread: the application may be removing a checkpoint meanwhile, whose temporary
     * name a sweep would take for a dead one. */
    ms_status status = ms_checkpoint_sweep(context, folder);
    if (!status) status = ms_allocate(context, sizeof *job, "a checkpoint", (void **)&job);
    if (status) return status;
    ms_context_init(&job->context, context->os);
    status = job_fill(context, job, folder, name, manifest, bytes);
    if (!status) status = job_begin(context, job, snapshot);
    if (!status) *out = job;
    else job_free(context, job);
    return status;
}

/* The thread may still have to leave its function; the join in ms_checkpoint_wait covers that. */
bool ms_checkpoint_is_done(const ms_checkpoint_job *job) { return atomic_load(&job->done); }

/* The join never fails, so the job is freed whatever the thread has met, and its error moves to the
 * caller's context. */
ms_status ms_checkpoint_wait(ms_context *context, ms_checkpoint_job *job)
{
    const ms_os *os = context->os;
    os->thread_join(os->user, job->thread);
    ms_status status = job->status;
    if (status) context->error = job->context.error;
    job_free(context, job);
    return status;
}
