# make image makes the same without Docker. The program is the same byte by byte
# for the same sources, VERSION and version of Go; so is the image if its builder
# is BuildKit, with the times that make image-docker gives it.
ARG BUILDER=golang:1.26.8
FROM ${BUILDER} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
RUN GOTOOLCHAIN=local make build VERSION=${VERSION} && touch -d @0 bin/fingerpost && chmod 755 bin/fingerpost

# Runs as root: it makes directories below /run on the node. It needs no
# capability; the DaemonSet drops them all.
FROM scratch
COPY --from=build /src/bin/fingerpost /fingerpost
ENTRYPOINT ["/fingerpost"]
CMD ["agent"]
