ARG BUILDER=golang:1.26
FROM ${BUILDER} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
RUN CGO_ENABLED=0 go build -trimpath -tags grpcnotrace -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /fingerpost ./cmd/fingerpost

# Runs as root: it makes directories below /run on the node. It needs no
# capability; the DaemonSet drops them all.
FROM scratch
COPY --from=build /fingerpost /fingerpost
ENTRYPOINT ["/fingerpost"]
CMD ["agent"]
