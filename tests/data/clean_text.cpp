#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/data/clean_text.hpp>

namespace {

using namespace seqmix;
using data::html_to_text;

/// As a domain's text would hold it.
std::string cleaned(std::string const& text) { return data::line_cleaner()(text); }

DOCTEST_TEST_CASE("HTML: elements that are not prose are dropped with all they hold") {
  for (auto const* name : {"script", "style", "nav", "header", "footer", "svg", "aside"}) {
    auto const tag = std::string(name);
    DOCTEST_CHECK(html_to_text("a<" + tag + " x=\"1\">gone <b>too</b></" + tag + ">b") == "ab");
  }
  DOCTEST_CHECK(html_to_text("<html><head><title>gone</title></head><body>kept</body>") == "kept\n");
  DOCTEST_CHECK(html_to_text("<head><title>gone</title><body>kept") == "kept");
  DOCTEST_CHECK(html_to_text("<header>gone</header><h1>kept</h1>") == "kept\n\n");
  DOCTEST_CHECK(html_to_text("a<nav>x<nav>y</nav>z</nav>b") == "ab");
  DOCTEST_CHECK(html_to_text("a<script>if (a < b) { '<p>' } </script>b") == "ab");
  DOCTEST_CHECK(html_to_text("a<svg/>b<nav>never closed") == "abnever closed");
  DOCTEST_CHECK(html_to_text("a<!-- <p>gone</p> -->b<!DOCTYPE html><?xml x?>c") == "abc");
}

DOCTEST_TEST_CASE("HTML: menus known by their class are dropped, words that only look so are not") {
  DOCTEST_CHECK(html_to_text("<div class=\"big navheader\"><div>gone</div></div>kept") == "kept");
  DOCTEST_CHECK(html_to_text("<div class=nosearch>gone</div>kept") == "kept");
  DOCTEST_CHECK(html_to_text("<span class=\"menuitem\">kept</span>") == "kept");
}

DOCTEST_TEST_CASE("HTML: block tags become line breaks, white space runs together, but not in pre") {
  DOCTEST_CHECK(cleaned(html_to_text("<p>one\n  two</p><p>three<br>four</p>")) == "one two\n\nthree\nfour\n");
  DOCTEST_CHECK(html_to_text("<ul><li>a</li><li>b</li></ul>") == "a\nb\n");
  DOCTEST_CHECK(html_to_text("<tr><td>a</td><td>b</td></tr>") == "a  b\n");
  DOCTEST_CHECK(html_to_text("<pre>a\n   b</pre>") == "a\n   b\n\n");
  DOCTEST_CHECK(html_to_text("a <em>b</em>, <code>c</code>") == "a b, c");
}

DOCTEST_TEST_CASE("HTML: entities become characters, unknown ones and lone signs stay") {
  DOCTEST_CHECK(html_to_text("a &lt;b&gt; &amp;amp; &quot;c&quot;") == "a <b> &amp; \"c\"");
  DOCTEST_CHECK(html_to_text("f&uuml;r&#8212;&#x2014;&#xE4;") == "f\xC3\xBCr\xE2\x80\x94\xE2\x80\x94\xC3\xA4");
  DOCTEST_CHECK(html_to_text("a&nbsp;b\xC2\xA0"
                             "c&#160;d") == "a b c d");
  DOCTEST_CHECK(html_to_text("&nosuch; a & b &#xD800; &#; 1 < 2") == "&nosuch; a & b &#xD800; &#; 1 < 2");
}

DOCTEST_TEST_CASE("HTML: a sign in a quoted attribute does not end its tag") {
  DOCTEST_CHECK(html_to_text("a<img alt=\"->\" title='>'>b") == "ab");
  DOCTEST_CHECK(html_to_text("torn <a href=\"x") == "torn ");
}

DOCTEST_TEST_CASE("manual pages: headings and text stay, requests and fonts go") {
  DOCTEST_CHECK(cleaned(data::roff_to_text(".TH LS 1\n.\\\" comment\n.SH NAME\nls \\- list \\fBall\\fR files\n"
                                           ".de Vb\n.ft CW\n..\n.BR ls \" (1)\"\n\\(aqq\\(aq \\[:u]ber \\(co\n")) ==
                "NAME\nls - list all files\nls (1)\n'q' \xC3\xBC"
                "ber \xC2\xA9\n");
  DOCTEST_CHECK(data::roff_to_text("a\\f(CWb\\f[R]c\\*(L\"d\\s-1e\\h'1'f\\\" gone\n") == "abcdef\n");
  DOCTEST_CHECK(data::roff_to_text("end \\\n\\f") == "end \\\n\n");
}

DOCTEST_TEST_CASE("lines of more than 2,000 characters and control characters are dropped") {
  DOCTEST_CHECK(cleaned("a\n" + std::string(2000, 'x') + "\nb") == "a\n" + std::string(2000, 'x') + "\nb\n");
  DOCTEST_CHECK(cleaned("a\n" + std::string(2001, 'x') + "\nb") == "a\nb\n");
  std::string umlauts;
  for (int i = 0; i < 2000; ++i) umlauts += "\xC3\xBC";
  DOCTEST_CHECK(cleaned(umlauts) == umlauts + "\n");
  DOCTEST_CHECK(cleaned("a\x01\x1B[1mb\tc\x7F  \r\n\r\n\r\n\r\nd") == "a[1mb\tc\n\nd\n");
  DOCTEST_CHECK(cleaned("\n\n  \n") == "");
}

DOCTEST_TEST_CASE("a line of 40 characters is kept the first time in a domain, a shorter one always") {
  std::string const forty(40, 'x'), short_line(39, 'y');
  data::line_cleaner domain;
  DOCTEST_CHECK(domain(forty + "\n" + short_line + "\n" + forty) == forty + "\n" + short_line + "\n");
  DOCTEST_CHECK(domain(short_line + "\n" + forty + "\n") == short_line + "\n");
  data::line_cleaner another;
  DOCTEST_CHECK(another(forty) == forty + "\n");
}

DOCTEST_TEST_CASE("documents stand in the order of the hash of their paths, whatever the order given") {
  std::vector<data::document> documents;
  for (int i = 0; i < 30; ++i) documents.push_back({"doc/" + std::to_string(i), "text " + std::to_string(i)});
  auto reversed = documents;
  std::reverse(reversed.begin(), reversed.end());
  auto const text = data::clean_domain(documents);
  DOCTEST_CHECK(data::clean_domain(reversed) == text);
  std::string in_path_order;
  for (auto const& document : documents)
    in_path_order += (in_path_order.empty() ? "" : "\n") + document.text + "\n";
  DOCTEST_CHECK(text.size() == in_path_order.size());
  DOCTEST_CHECK(text != in_path_order);
  DOCTEST_CHECK(data::path_hash("doc/1") == 0x8f2628d6bfc7a567u);
  DOCTEST_CHECK(data::clean_domain(documents, {}, 50).size() < 70);
}

DOCTEST_TEST_CASE("the head of a domain is test, the next part validation, the rest training") {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "line " + std::to_string(1000 + i) + "\n";
  auto const parts = data::split_domain(text, 1000);
  DOCTEST_CHECK(parts.test + parts.validation + parts.train == text);
  DOCTEST_CHECK(parts.test.size() == 1000);
  DOCTEST_CHECK(parts.validation.size() == 1000);
  auto const uneven = data::split_domain(text, 1005);
  DOCTEST_CHECK(uneven.test.size() == 1000);
  DOCTEST_CHECK(uneven.test + uneven.validation + uneven.train == text);
  auto const small = data::split_domain(text);
  DOCTEST_CHECK(small.test.size() == text.size() / 4);
  DOCTEST_CHECK(small.validation.size() == text.size() / 4);
  DOCTEST_CHECK(small.train.size() == text.size() / 2);
  auto const one_line = data::split_domain(std::string(40000, 'x'), 10000);
  DOCTEST_CHECK(one_line.test.size() == 10000);
  DOCTEST_CHECK(data::split_domain("").train.empty());
}

}  // namespace
