/* An S3 endpoint that keeps nothing, to measure what a client costs: bodies are thrown away in the kernel.
 *
 *     gcc -O2 -pthread null_s3.c -o null_s3 && ./null_s3 [FOLDER]
 *
 * Listens on a free port of 127.0.0.1, prints it, and ends when its standard input does. Answers puts, multipart
 * uploads and deletes with success. With FOLDER, the key `a/b` of any bucket is read from FOLDER/a/b, whole or a range
 * of it, straight from the page cache, and every listing is empty; every other request is answered 404. One thread a
 * connection; keep-alive. A body must come with a Content-Length.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEAD_BYTES 65536
#define DISCARD_BYTES (1 << 20)

static const char BEGUN[] =
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?><InitiateMultipartUploadResult><Bucket>null</Bucket><Key>k</Key>"
    "<UploadId>u</UploadId></InitiateMultipartUploadResult>";
static const char COMPLETED[] =
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?><CompleteMultipartUploadResult><Bucket>null</Bucket><Key>k</Key>"
    "<ETag>\"e\"</ETag></CompleteMultipartUploadResult>";

static const char LISTED[] =
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult><Name>null</Name><IsTruncated>false</IsTruncated>"
    "</ListBucketResult>";
static const char *folder;

static int send_all(int fd, const char *data, size_t size)
{
    while (size > 0) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
        if (sent <= 0)
            return -1;
        data += sent;
        size -= (size_t)sent;
    }
    return 0;
}

static int answer(int fd, const char *status, const char *body)
{
    char text[1024];
    int size = snprintf(text, sizeof text, "HTTP/1.1 %s\r\nETag: \"e\"\r\nContent-Length: %zu\r\n\r\n%s", status,
                        strlen(body), body);
    return send_all(fd, text, (size_t)size);
}

/* MSG_TRUNC on a TCP socket drops the bytes without copying them out; kernels that do not know it use the buffer. */
static int discard(int fd, long long size, char *buffer)
{
    while (size > 0) {
        size_t most = size < DISCARD_BYTES ? (size_t)size : DISCARD_BYTES;
        ssize_t got = recv(fd, buffer, most, MSG_TRUNC);
        if (got <= 0)
            return -1;
        size -= got;
    }
    return 0;
}

/* Answers a GET or HEAD from `folder`; the target is /bucket/key?query. */
static int answer_file(int fd, const char *target, const char *head, int is_get)
{
    char path[8192], text[512];
    const char *key = strchr(target + 1, '/'), *range = strcasestr(head, "\r\nrange: bytes=");
    struct stat info;
    int file = -1, failed;
    if (folder != NULL && strstr(target, "list-type=2") != NULL)
        return answer(fd, "200 OK", LISTED);
    if (folder != NULL && key != NULL && strstr(key, "..") == NULL) {
        snprintf(path, sizeof path, "%s%.*s", folder, (int)strcspn(key, "?"), key);
        file = open(path, O_RDONLY);
    }
    if (file < 0 || fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
        if (file >= 0)
            close(file);
        return answer(fd, "404 Not Found", "");
    }
    long long size = info.st_size, first = 0, last = size - 1;
    if (range != NULL && sscanf(range + 15, "%lld-%lld", &first, &last) == 2 && last >= size)
        last = size - 1;
    off_t at = first;
    int length = snprintf(text, sizeof text,
                          "HTTP/1.1 %s\r\nETag: \"e\"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
                          "Content-Range: bytes %lld-%lld/%lld\r\nContent-Length: %lld\r\n\r\n",
                          range != NULL ? "206 Partial Content" : "200 OK", first, last, size, last - first + 1);
    failed = send_all(fd, text, (size_t)length);
    while (is_get && !failed && at <= last)
        failed = sendfile(fd, file, &at, (size_t)(last + 1 - at)) <= 0;
    close(file);
    return failed;
}

static void *serve(void *argument)
{
    int fd = (int)(long)argument;
    char *head = malloc(HEAD_BYTES + 1), *buffer = malloc(DISCARD_BYTES);
    size_t have = 0;
    while (head != NULL && buffer != NULL) {
        char *end;
        while (head[have] = 0, (end = strstr(head, "\r\n\r\n")) == NULL) {
            ssize_t got = have < HEAD_BYTES ? recv(fd, head + have, HEAD_BYTES - have, 0) : 0;
            if (got <= 0)
                goto closed;
            have += (size_t)got;
        }
        end[2] = 0;
        size_t head_size = (size_t)(end - head) + 4, rest = have - head_size;
        char *length = strcasestr(head, "\r\ncontent-length:");
        long long body = length != NULL ? atoll(length + 17) : 0;
        char method[16] = "", target[4096] = "";
        sscanf(head, "%15s %4095s", method, target);
        if ((long long)rest > body) {
            memmove(head, head + head_size + body, rest - (size_t)body);
            have = rest - (size_t)body;
        } else if (discard(fd, body - (long long)rest, buffer) == 0) {
            have = 0;
        } else {
            goto closed;
        }
        int failed;
        if (strcmp(method, "PUT") == 0)
            failed = answer(fd, "200 OK", "");
        else if (strcmp(method, "POST") == 0)
            failed = answer(fd, "200 OK", strstr(target, "uploads") != NULL ? BEGUN : COMPLETED);
        else if (strcmp(method, "DELETE") == 0)
            failed = send_all(fd, "HTTP/1.1 204 No Content\r\n\r\n", 27);
        else if (strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0)
            failed = answer_file(fd, target, head, strcmp(method, "GET") == 0);
        else
            failed = answer(fd, "404 Not Found", "");
        if (failed)
            goto closed;
    }
closed:
    free(head);
    free(buffer);
    close(fd);
    return NULL;
}

static void *end_with_input(void *unused)
{
    char byte;
    (void)unused;
    while (read(0, &byte, 1) > 0)
        ;
    exit(0);
}

int main(int count, char **arguments)
{
    folder = count > 1 ? arguments[1] : NULL;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    pthread_t thread;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 128) ||
        getsockname(listener, (struct sockaddr *)&address, &size) ||
        pthread_create(&thread, NULL, end_with_input, NULL)) {
        perror("null_s3");
        return 1;
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            continue;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (pthread_create(&thread, NULL, serve, (void *)(long)fd) == 0)
            pthread_detach(thread);
        else
            close(fd);
    }
}
