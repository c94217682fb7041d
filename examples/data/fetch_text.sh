#!/bin/sh
# Fetches the text of the limited-domain study: Debian packages, downloaded with apt-get and unpacked with dpkg into a
# cache folder. Needs no root and installs nothing. A package that cannot be had is named and left out; without a
# network the next step (prepare_text) takes text that is already on the machine.
#
#   fetch_text.sh CACHE_DIR [quick|all]
#
# quick: about 42 MB of downloads. all: also the big dictionary, the LaTeX manuals and the Linux sources (280 MB more).
# Writes CACHE_DIR/unpacked/<package>/... and CACHE_DIR/packages.tsv: package and version of those of this run that are
# there, and the version of the installed Python library.
set -u

usage() { echo "usage: fetch_text.sh CACHE_DIR [quick|all]" >&2; exit 2; }
[ $# -ge 1 ] && [ $# -le 2 ] || usage
cache=$1
set_name=${2:-quick}

packages="vim-doc postgresql-doc-15 sqlite3-doc libreoffice-help-en-us git-doc apache2-doc
  r-cran-janeaustenr dict-foldoc dict-jargon newlib-source perl-doc libreoffice-help-de"
case $set_name in
  quick) ;;
  all) packages="$packages dict-gcide texlive-latex-base-doc texlive-latex-recommended-doc linux-source-6.1" ;;
  *) usage ;;
esac

mkdir -p "$cache/debs" "$cache/unpacked" || { echo "fetch_text: cannot make $cache" >&2; exit 1; }
cache=$(cd "$cache" && pwd)

# The name of the newest downloaded file of a package, if any.
cached_deb() { ls -t "$cache/debs/$1"_*.deb 2>/dev/null | head -n 1; }

# Downloads the named packages; short timeouts, so that a machine without a network is told so soon.
download() {
  (cd "$cache/debs" && apt-get -q -o APT::Sandbox::User=root -o Acquire::Retries=1 -o Acquire::http::Timeout=15 \
    -o Acquire::https::Timeout=15 download "$@") >>"$cache/fetch.log" 2>&1
}

# Updates the package lists where we may; sudo only if it asks for no password.
update_lists() {
  echo "fetch_text: the package lists are missing or stale, trying apt-get update"
  if [ "$(id -u)" -eq 0 ]; then run=""
  elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then run="sudo -n"
  else echo "fetch_text: apt-get update needs root, going on without"; return 1; fi
  timeout 60 $run apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=15 update >>"$cache/fetch.log" 2>&1
}

# Leaves in $missing the wanted packages that are neither unpacked nor downloaded.
find_missing() {
  missing=""
  for package in $packages; do
    [ -n "$(cached_deb "$package")" ] || [ -e "$cache/unpacked/$package/.complete" ] || missing="$missing $package"
  done
}

# Unpacks one package beside its final place and moves it there, so that an interrupted run leaves nothing half done.
unpack() {
  place="$cache/unpacked/$1"
  rm -rf "$place.new" && mkdir "$place.new" && dpkg -x "$2" "$place.new" || return 1
  find "$place.new/usr/src" -name '*.tar.xz' >"$cache/archives" 2>/dev/null
  while IFS= read -r archive; do
    if command -v xz >/dev/null 2>&1; then xz -dc "$archive"; else /usr/lib/apt/apt-helper cat-file "$archive"; fi |
      tar -x -C "$(dirname "$archive")" --wildcards --no-anchored '*.c' '*.h' || return 1
    rm "$archive"
  done <"$cache/archives"
  rm -f "$cache/archives"
  dpkg-deb -f "$2" Version >"$place.new/.complete" || return 1
  rm -rf "$place" && mv "$place.new" "$place"
}

: >"$cache/fetch.log"
# The standard library of Python is code to test on; taken from a package only where the system has none.
if ! ls /usr/lib/python3.*/os.py >/dev/null 2>&1 && command -v apt-cache >/dev/null 2>&1; then
  python=$(apt-cache depends libpython3-stdlib 2>/dev/null |
    sed -n 's/.*Depends: \(libpython3\.[0-9]*-stdlib\).*/\1/p' | head -n 1)
  packages="$packages ${python:-libpython3.11-stdlib}"
fi

find_missing
if [ -n "$missing" ] && command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1; then
  echo "fetch_text: downloading$missing"
  if ! download $missing; then
    # One unknown package stops apt-get for all: once more with fresh lists, then each by itself.
    find_missing
    update_lists && download $missing
    find_missing
    failed=0
    for package in $missing; do
      # After two failures in a row there is no network, or no such release: stop waiting.
      if download "$package"; then failed=0; else failed=$((failed + 1)); fi
      [ $failed -lt 3 ] || break
    done
  fi
elif [ -n "$missing" ]; then
  echo "fetch_text: this machine has no apt-get and dpkg"
fi

: >"$cache/packages.tsv.new"
there=0
left_out=""
for package in $packages; do
  deb=$(cached_deb "$package")
  if [ ! -e "$cache/unpacked/$package/.complete" ] && [ -n "$deb" ] && ! unpack "$package" "$deb"; then
    echo "fetch_text: cannot unpack $deb"
    rm -f "$deb"
  fi
  if [ -e "$cache/unpacked/$package/.complete" ]; then
    printf '%s\t%s\n' "$package" "$(cat "$cache/unpacked/$package/.complete")" >>"$cache/packages.tsv.new"
    there=$((there + 1))
  else
    left_out="$left_out $package"
  fi
done
for library in /usr/lib/python3.*/os.py; do
  [ -e "$library" ] || continue
  version=$(dpkg-query -W -f '${Version}' "lib$(basename "$(dirname "$library")")-stdlib" 2>/dev/null)
  [ -z "$version" ] || printf 'installed:%s\t%s\n' "$(dirname "$library")" "$version" >>"$cache/packages.tsv.new"
done
mv "$cache/packages.tsv.new" "$cache/packages.tsv"

[ -z "$left_out" ] || echo "fetch_text: could not get$left_out (see $cache/fetch.log); left out"
if [ $there -eq 0 ]; then
  echo "fetch_text: no package could be fetched (no network?); text that is already on this machine will be used"
else
  echo "fetch_text: $there packages in $cache ($(du -sm "$cache/debs" | cut -f1) MB downloaded)"
fi
