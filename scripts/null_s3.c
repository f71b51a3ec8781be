/* An S3 endpoint that keeps nothing, to measure what a client costs: bodies are thrown away in the kernel.
 *
 *     gcc -O2 -pthread null_s3.c -o null_s3 && ./null_s3
 *
 * Listens on a free port of 127.0.0.1, prints it, and ends when its standard input does. Answers puts, multipart
 * uploads and deletes with success, every other request with 404. One thread a connection; keep-alive.
 * A body must come with a Content-Length.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define HEAD_BYTES 65536
#define DISCARD_BYTES (1 << 20)

static const char BEGUN[] =
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?><InitiateMultipartUploadResult><Bucket>null</Bucket><Key>k</Key>"
    "<UploadId>u</UploadId></InitiateMultipartUploadResult>";
static const char COMPLETED[] =
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?><CompleteMultipartUploadResult><Bucket>null</Bucket><Key>k</Key>"
    "<ETag>\"e\"</ETag></CompleteMultipartUploadResult>";

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
        else if (strcmp(method, "HEAD") == 0)
            failed = send_all(fd, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", 45);
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

int main(void)
{
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
