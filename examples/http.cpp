// A gradient from C++ with nothing but POSIX sockets: safetensors in and out over plain HTTP.
//
//   c++ -std=c++20 -o http http.cpp && ./http 127.0.0.1 8000
//
// A real program would use an HTTP library; what matters here are the bytes.

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

// A safetensors file: the length of its header (little-endian), the header as JSON, the data.
static std::string safetensors(const std::string& header, const std::vector<float>& data) {
    const std::uint64_t length = header.size();
    std::string file(8 + header.size() + data.size() * sizeof(float), '\0');
    std::memcpy(file.data(), &length, 8);
    std::memcpy(file.data() + 8, header.data(), header.size());
    std::memcpy(file.data() + 8 + header.size(), data.data(), data.size() * sizeof(float));
    return file;
}

static int connect_to(const char* host, const char* port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (getaddrinfo(host, port, &hints, &found) != 0) throw std::runtime_error("no such host");
    const int connection = socket(found->ai_family, found->ai_socktype, found->ai_protocol);
    const int refused = connect(connection, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    if (refused != 0) throw std::runtime_error("is a server running? `convgrad serve`");
    return connection;
}

static std::string post(const char* host, const char* port, const std::string& path,
                        const std::string& body) {
    const std::string request = "POST " + path + " HTTP/1.1\r\nHost: " + host +
                                "\r\nContent-Type: application/vnd.safetensors\r\nContent-Length: " +
                                std::to_string(body.size()) + "\r\nConnection: close\r\n\r\n" + body;
    const int connection = connect_to(host, port);
    for (std::size_t sent = 0; sent < request.size();) {
        const ssize_t n = send(connection, request.data() + sent, request.size() - sent, 0);
        if (n <= 0) throw std::runtime_error("the connection broke");
        sent += static_cast<std::size_t>(n);
    }
    std::string answer;
    char buffer[65536];
    for (ssize_t n; (n = recv(connection, buffer, sizeof buffer, 0)) > 0;) {
        answer.append(buffer, static_cast<std::size_t>(n));
    }
    close(connection);
    const std::size_t end = answer.find("\r\n\r\n");
    if (end == std::string::npos) throw std::runtime_error("the answer broke off");
    if (answer.compare(9, 3, "200") != 0) throw std::runtime_error(answer.substr(end + 4));
    return answer.substr(end + 4);
}

int main(int argc, char** argv) try {
    const char* host = argc > 1 ? argv[1] : "127.0.0.1";
    const char* port = argc > 2 ? argv[2] : "8000";
    // grad_output [1, 4, 8, 8] and weight [4, 2, 3, 3], one after the other.
    const std::string header =
        R"({"__metadata__": {"parameters": "{\"padding\": 1}"},)"
        R"( "grad_output": {"dtype": "F32", "shape": [1, 4, 8, 8], "data_offsets": [0, 1024]},)"
        R"( "weight": {"dtype": "F32", "shape": [4, 2, 3, 3], "data_offsets": [1024, 1312]}})";
    const std::string answer =
        post(host, port, "/conv_bwd_data", safetensors(header, std::vector<float>(256 + 72, 1.0F)));
    // The answer has one tensor, grad_input [1, 2, 8, 8], at the end of the file.
    std::vector<float> gradient(1 * 2 * 8 * 8);
    const std::size_t bytes = gradient.size() * sizeof(float);
    if (answer.size() < bytes) throw std::runtime_error("the answer is too short");
    std::memcpy(gradient.data(), answer.data() + answer.size() - bytes, bytes);
    std::cout << "1x2x8x8 " << *std::max_element(gradient.begin(), gradient.end()) << "\n";
    return EXIT_SUCCESS;
} catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
}
